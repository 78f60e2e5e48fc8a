/* The program around the body: parameters, prologue, and the device functions that it uses.
 *
 * A file of device/ is a list of entries, each opened by a line "//! name". An entry is printed,
 * before the body, if its name occurs as a word in the body or in another printed entry; so entries
 * may use each other in any order. The entry "types" comes first in every program. Lines inside
 * #ifdef HAS_<feature of targets.def> are for targets with that feature.
 *
 * Parameters: tensor maps, then a pointer for each kernel argument whose address the body uses,
 * then one to the counters of NEXT_TILE and FETCH_TILE, which are zero when a launch starts and
 * again when it ends; then what checks and watched waits report to; then, for a mesh of devices,
 * the table of peers (remote.c). */
#define _GNU_SOURCE /* memmem */
#include <stdlib.h>

#include "../base/env.h"
#include "gen.h"

enum { MOST_TILES = INT32_MAX - (1 << 24) }; /* so that no counter of them overflows */

/* ---- the catalogue ----------------------------------------------------------------------- */

typedef struct entry {
  const char *name, *text;
  uint32_t name_size, size;
  bool of_stand_in, done;
} entry;

typedef struct catalogue {
  pm_arena *arena;
  const pm_target *target;
  pm_text *out;
  const pm_gen *e;
  PM_VEC(entry) entries; /* sorted by name */
  uint32_t first[257];   /* number of the first entry whose name begins with this byte or more */
} catalogue;

static int compare_names(const char *a, uint32_t n, const char *b, uint32_t m) {
  const int c = memcmp(a, b, n < m ? n : m);
  return c ? c : n < m ? -1 : n > m;
}

static int compare_entries(const void *a, const void *b) {
  const entry *x = a, *y = b;
  const int c = compare_names(x->name, x->name_size, y->name, y->name_size);
  return c ? c : y->of_stand_in - x->of_stand_in;
}

/* Files that stand_in begins the names of are for it alone. Another catalogue replaces all files
 * but stand_in.cuh, which is C++ without PTX. */
static bool is_wanted(const pm_gen *e, const char *file) {
  const bool of_stand_in = !strncmp(file, "stand_in", 8);
  if (e->options->entry_only) return pm_stands_in(e) && !strcmp(file, "stand_in.cuh");
  return !of_stand_in || pm_stands_in(e);
}

/* Of entries with the same name the first stays: that of the stand-in. */
static void drop_replaced(catalogue *c) {
  uint32_t n = 0;
  for (uint32_t k = 0; k < c->entries.n; k++) {
    const entry *x = &c->entries.at[k], *last = n ? &c->entries.at[n - 1] : NULL;
    if (last && !compare_names(last->name, last->name_size, x->name, x->name_size)) continue;
    c->entries.at[n++] = *x;
  }
  c->entries.n = n;
}

/* Is the feature, whose name ends with the line, one of the target's? */
static bool has_feature(const pm_target *t, const char *name) {
  const size_t n = strcspn(name, "\n");
  for (int k = 0; k < PM_FEATURE_COUNT; k++) {
    const char *known = pm_feature_names[k];
    if (strlen(known) == n && !memcmp(known, name, n)) return t->features >> k & 1;
  }
  return false;
}

/* The lines of an entry that are for the target: those that #ifdef HAS_... leaves. */
static void resolve(catalogue *c, entry *e) {
  static const char mark[] = "#ifdef HAS_";
  enum { ALWAYS, TAKEN, SKIPPED } now = ALWAYS;
  int inner = 0; /* other conditionals, which are the compiler's */
  pm_text out;
  if (!memmem(e->text, e->size, mark, sizeof mark - 1)) return;
  pm_text_init(&out, c->arena);
  for (const char *at = e->text, *end = at + e->size; at < end;) {
    const size_t n = strcspn(at, "\n") + 1;
    const bool ours = !strncmp(at, mark, sizeof mark - 1);
    inner += !ours && !strncmp(at, "#if", 3);
    if (ours) now = has_feature(c->target, at + sizeof mark - 1) ? TAKEN : SKIPPED;
    else if (now && !inner && !strncmp(at, "#else", 5)) now = now == TAKEN ? SKIPPED : TAKEN;
    else if (now && !inner && !strncmp(at, "#endif", 6)) now = ALWAYS;
    else if (now != SKIPPED) pm_putn(&out, at, pm_min((int64_t)n, end - at));
    inner -= inner && !strncmp(at, "#endif", 6);
    at += n;
  }
  e->text = out.at;
  e->size = out.n;
}

static void read_catalogue(catalogue *c) {
  static const char mark[] = "\n//! ";
  for (unsigned k = 0; k < pm_device_file_count; k++) {
    const char *file = pm_device_files[k].name, *at = strstr(pm_device_files[k].text, mark);
    while (at && is_wanted(c->e, file)) {
      entry e = {.name = at + sizeof mark - 1, .of_stand_in = !strncmp(file, "stand_in", 8)};
      const char *line = strchr(e.name, '\n');
      if (!line) break;
      at = strstr(line, mark);
      e.name_size = (uint32_t)(line - e.name);
      e.text = line + 1;
      e.size = (uint32_t)(at ? (size_t)(at - e.text) : strlen(e.text));
      while (e.size && e.text[e.size - 1] == '\n') e.size--;
      pm_vec_push(c->arena, &c->entries, e);
    }
  }
  if (c->entries.n) qsort(c->entries.at, c->entries.n, sizeof(entry), compare_entries);
  drop_replaced(c);
  for (uint32_t k = 0, byte = 0; byte < PM_COUNT(c->first); byte++) {
    while (k < c->entries.n && (uint8_t)*c->entries.at[k].name < byte) k++;
    c->first[byte] = k;
  }
}

static entry *find_entry(catalogue *c, const char *name, uint32_t n) {
  const uint8_t byte = (uint8_t)*name;
  uint32_t lo = c->first[byte], hi = c->first[byte + 1];
  while (lo < hi) {
    const uint32_t mid = lo + (hi - lo) / 2;
    entry *e = &c->entries.at[mid];
    const int order = compare_names(name, n, e->name, e->name_size);
    if (!order) return e;
    if (order < 0) {
      hi = mid;
    } else {
      lo = mid + 1;
    }
  }
  return NULL;
}

static bool is_letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
}
static bool is_word(char c) { return is_letter(c) || (c >= '0' && c <= '9'); }

/* Print what the text uses and was not printed yet. */
static void print_used(catalogue *c, const char *text, size_t size) {
  const char *end = text + size;
  for (const char *s = text; s < end;) {
    if (!is_letter(*s)) {
      while (s < end && is_word(*s)) s++; /* a number and its suffix */
      if (s < end && !is_letter(*s)) s++;
      continue;
    }
    const char *word = s;
    while (s < end && is_word(*s)) s++;
    entry *e = find_entry(c, word, (uint32_t)(s - word));
    if (!e || e->done) continue;
    e->done = true;
    resolve(c, e);
    print_used(c, e->text, e->size);
    pm_putn(c->out, e->text, e->size);
    pm_put(c->out, "\n\n");
  }
}

/* ---- launch ------------------------------------------------------------------------------ */

/* CUDA counts at most so many blocks along x, y and z. */
static const int64_t most_blocks[3] = {INT32_MAX, 65535, 65535};

static uint32_t along(const pm_launch_grid *g, uint32_t axis) {
  return g->folded ? 0 : (uint32_t)pm_min(g->n - 1 - axis, 2);
}

pm_code pm_launch_blocks(const pm_launch_grid *g, const char *name, const int64_t *sizes,
                         uint32_t *blocks, pm_err *err) {
  int64_t n[3] = {1, 1, 1};
  for (uint32_t k = 0; k < g->n; k++) {
    int64_t *axis = &n[along(g, k)];
    const int64_t points = g->size[k] ? sizes[g->size[k]] : g->axis[k];
    *axis = pm_min(*axis * points, INT32_MAX + 1LL);
  }
  if (g->shares && n[0] > MOST_TILES / (int64_t)g->cluster[0])
    return pm_fail(err, PM_E_VALUE,
                   "kernel %s: dynamic_scheduling_loop hands out at most %d points, the grid has "
                   "%lld",
                   name, MOST_TILES / (int)g->cluster[0], (long long)n[0]);
  for (int d = 0; d < 3; d++) {
    n[d] *= g->cluster[d];
    blocks[d] = (uint32_t)n[d];
    if (n[d] <= most_blocks[d]) continue;
    return pm_fail(err, PM_E_VALUE,
                   "kernel %s: its grid has %lld blocks along CUDA's %c, which is %s; at most %lld "
                   "are possible there. Only the last axis may be larger: put it last, or fold "
                   "axes into it",
                   name, (long long)n[d], "xyz"[d],
                   d == 0   ? g->folded ? "all its axes" : "its last axis"
                   : d == 1 ? "its last axis but one"
                            : "the product of its other axes",
                   (long long)most_blocks[d]);
  }
  return PM_OK;
}

/* Must all axes lie along x, because CUDA's y and z are short? Where sizes of the call may be too
 * large for these, only if they are those of the first axis: then blocks divide by constants. */
static bool must_fold(const pm_graph *g) {
  const pm_launch_grid l = {.n = g->n_grid};
  int64_t n[3] = {1, 1, 1};
  for (uint32_t k = 0; k < g->n_grid; k++) {
    const uint32_t size = g->grid_sizes[k];
    if (size && k) return false;
    n[along(&l, k)] *= size ? g->sizes.at[size].most : g->grid[k];
  }
  return n[1] > most_blocks[1] || n[2] > most_blocks[2];
}

static pm_code set_grid(pm_gen *e) {
  const pm_graph *g = e->g;
  pm_program *p = e->program;
  pm_launch_grid *l = &p->launch;
  int64_t one[PM_MAX_SIZES];
  p->shares_grid = pm_shares_grid(g);
  *l = (pm_launch_grid){.n = g->n_grid, .shares = p->shares_grid};
  l->folded = p->shares_grid || must_fold(g);
  for (uint32_t k = 0; k < g->n_grid; k++) {
    l->axis[k] = g->grid[k];
    l->size[k] = g->grid_sizes[k];
    l->open |= g->grid_sizes[k] != 0;
  }
  memcpy(l->cluster, p->cluster, sizeof l->cluster);
  for (uint32_t k = 0; k < PM_MAX_SIZES; k++) one[k] = 1; /* those of a call are checked there */
  return pm_launch_blocks(l, g->name ? g->name : "", one, p->grid, e->err);
}

static pm_code set_geometry(pm_gen *e) {
  const pm_graph *g = e->g;
  pm_program *p = e->program;
  for (int k = 0; k < 3; k++) p->cluster[k] = 1;
  for (uint32_t k = 0; k < g->n_cluster; k++) {
    p->cluster[g->n_cluster - 1 - k] = (uint32_t)g->cluster[k];
  }
  PM_TRY(set_grid(e));
  p->n_sizes = g->sizes.n;
  p->block = 128 * g->n_threads + (pm_stands_in(e) ? PM_STAND_IN_LANES : 0);
  p->smem_bytes = (uint32_t)g->smem_bytes;
  if (pm_has_tmem(e)) {
    e->tmem_slot = (uint32_t)pm_round_up(p->smem_bytes, 16);
    p->smem_bytes = e->tmem_slot + 16;
    if (p->smem_bytes > e->target->smem) {
      return pm_fail(e->err, PM_E_VALUE,
                     "kernel %s: with 16 bytes for the address of its TMEM it needs %u bytes of "
                     "SMEM, a block has %lld",
                     g->name ? g->name : "", p->smem_bytes, (long long)e->target->smem);
    }
  }
  p->target = e->target;
  p->machine = e->options->stand_in ? &pm_targets[PM_TARGET_SM_90A] : e->target;
  PM_TRY(pm_stand_in_check(e));
  p->n_devices = (uint32_t)pm_n_devices(g);
  p->meets_blocks = p->n_devices > 1;
  p->n_params = g->n_operands + g->n_outputs;
  p->align = PM_NEW(e->arena, int64_t, p->n_params + 1);
  p->names = PM_NEW(e->arena, const char *, p->n_params + 1);
  for (uint32_t k = 0; k < p->n_params; k++) {
    p->align[k] = pm_dtypes[pm_typeof(g, g->blocks.at[1].arg + k)->dtype].bytes;
    p->names[k] = g->strings.at[pm_value_of(g, g->blocks.at[1].arg + k)->name];
  }
  return PM_OK;
}

static const char *entry_name(pm_gen *e) {
  pm_text t;
  pm_text_init(&t, e->arena);
  const char *s = e->g->name ? e->g->name : "";
  if (!is_letter(*s)) pm_put(&t, "kernel_");
  for (; *s; s++) pm_putn(&t, is_word(*s) ? s : "_", 1);
  /* not the name of a function of the catalogue, nor a keyword */
  pm_put(&t, "_kernel");
  return t.at;
}

/* ---- prologue ---------------------------------------------------------------------------- */

static void count_uses(pm_gen *e) {
  const pm_graph *g = e->g;
  for (pm_opid op = 1; op < g->ops.n; op++) {
    for (uint32_t k = 0; k < pm_get(g, op)->n_in; k++) {
      e->uses[pm_in(g, op, k)]++;
      e->user[pm_in(g, op, k)] = op;
    }
    if (pm_is_barrier(pm_get(g, op))) e->barred[pm_in(g, op, 0)] = true;
  }
}

/* What must be known of the whole body in front of it. */
typedef struct survey {
  pm_gen *e;
  PM_VEC(pm_opid) barriers;
  PM_VEC(pm_opid) semaphores; /* of the block */
  uint32_t n_words;           /* semaphores of the launch */
  bool *keeps_phase;  /* by value: barrier allocations with a wait that does not know its phase */
  bool meets_lanes;   /* there are named barriers beside those of warpgroups */
  bool meets_cluster; /* a block uses the memory of another one of its cluster */
  bool in_warps;      /* warps go ways of their own */
} survey;

/* Counters of FETCH_TILE are not used where the launch has a cluster for each point. */
static void look_at_counter(survey *s, pm_opid op) {
  const bool asks = pm_get(s->e->g, op)->code != PM_OP_FETCH_TILE;
  const uint32_t counter = (uint32_t)*pm_attr(s->e->g, op, PM_ATTR_N);
  if (!asks && !s->e->program->shares_grid) return;
  if (counter >= s->e->n_counters) s->e->n_counters = counter + 1;
  s->e->asks |= asks;
}

static void look_at_accesses(survey *s, const pm_graph *g, pm_opid op) {
  pm_access a = pm_accesses(op);
  while (pm_next_access(g, &a)) {
    if (a.where == PM_IN_PHASE) s->keeps_phase[pm_view_base(g, a.view)] = true;
    if (a.where == PM_IN_COUNTER) look_at_counter(s, op);
    s->meets_cluster |= a.scope == PM_CLUSTER;
  }
}

static void look_at_allocation(survey *s, pm_graph *g, pm_opid op) {
  const pm_val out = pm_get(g, op)->out;
  uint32_t n;
  if (pm_typeof(g, out)->kind == PM_SEMAPHORE) pm_vec_push(s->e->arena, &s->semaphores, op);
  if (pm_typeof(g, out)->kind != PM_BARRIER) return;
  pm_vec_push(s->e->arena, &s->barriers, op);
  /* its phases go on where the scope comes again, those that the kernel counts do not */
  s->keeps_phase[out] |= pm_in_loop(g, op);
  const int64_t *groups = pm_attr_list(g, op, PM_ATTR_CLUSTER, &n);
  s->meets_cluster |= pm_cluster_targets(g, groups, n) > 1;
}

static void look(pm_graph *g, pm_opid op, void *ctx) {
  survey *s = ctx;
  const int code = pm_get(g, op)->code;
  look_at_accesses(s, g, op);
  if (pm_ops[code].effects & E_ALLOC) {
    look_at_allocation(s, g, op);
  } else if (code == PM_OP_GLOBAL_SEMAPHORE) {
    const int64_t end = *pm_attr(g, op, PM_ATTR_N) + pm_type_size(pm_typeof(g, pm_get(g, op)->out));
    s->n_words = (uint32_t)pm_max(s->n_words, end);
    s->e->asks = s->e->program->meets_blocks = true;
  } else if (code == PM_OP_SEMAPHORE_OF) {
    s->e->program->meets_blocks = true;
  } else if (code == PM_OP_MULTICAST_REF || code == PM_OP_MULTIMEM_STORE ||
             code == PM_OP_MULTIMEM_REDUCE) {
    s->e->program->multicasts = true;
  } else if (code == PM_OP_ASYNC_STORE) {
    s->e->sent[pm_view_base(g, pm_in(g, op, 2))] = true;
  } else if (code == PM_OP_ARRIVE && *pm_attr(g, op, PM_ATTR_ORDER) != PM_ORDER_RELAXED) {
    s->e->released[pm_view_base(g, pm_in(g, op, 0))] = true;
  } else if (code == PM_OP_TRY_CANCEL) {
    s->e->program->clears_counters = true;
  } else if (code == PM_OP_SCATTER_S2G) {
    s->e->warps_store = true; /* a lane of each warp */
  } else if (code == PM_OP_PDL_WAIT) {
    s->e->program->pdl = true;
  } else if (code == PM_OP_ENTER_SECTION) {
    s->e->n_section = (uint32_t)*pm_attr(g, op, PM_ATTR_N);
    s->e->section = op;
    s->meets_lanes = true;
  } else if (code == PM_OP_NAMED_SYNC || code == PM_OP_NAMED_ARRIVE) {
    s->meets_lanes = true;
  } else if (code == PM_OP_SCOPE) {
    s->meets_lanes |= *pm_attr(g, op, PM_ATTR_COLLECTIVE) && g->n_threads > 1;
  } else if (code == PM_OP_WARP_MAP) {
    s->in_warps = true;
    s->e->warps_store |= pm_warps_store(g, op);
  }
}

enum { N_ARRIVALS = 16 }; /* as many as there are named barriers */

/* Counters in place of named barriers, which have no wait that gives up. */
static pm_code place_arrivals(pm_gen *e) {
  pm_program *p = e->program;
  const uint32_t size = 4 * N_ARRIVALS;
  e->arrivals = (uint32_t)pm_round_up(pm_max(p->smem_bytes, 16), 16);
  p->smem_bytes = e->arrivals + size;
  if (p->smem_bytes <= e->target->smem) return PM_OK;
  return pm_fail(e->err, PM_E_VALUE,
                 "kernel %s: %s=1 takes %u bytes of SMEM for its named barriers and ordered "
                 "sections; with them it needs %u bytes, a block has %lld",
                 e->g->name ? e->g->name : "", pm_env_table[PM_ENV_SANITIZE].variable, size,
                 p->smem_bytes, (long long)e->target->smem);
}

/* Counts of all barriers, zeros in semaphores, a word of phase bits for those allocations that need
 * one. */
static pm_code print_barriers(pm_gen *e, const survey *s) {
  if (!s->barriers.n && !s->semaphores.n && !e->arrivals) return PM_OK;
  for (uint32_t k = 0; k < s->barriers.n; k++) {
    const pm_op *o = pm_get(e->g, s->barriers.at[k]);
    const int64_t n = pm_type_size(pm_typeof(e->g, o->out));
    if (n > 32) {
      return pm_gen_fail(
          e, s->barriers.at[k], PM_E_NOT_IMPLEMENTED,
          "%lld barriers in one allocation: more than 32 are not available; split it",
          (long long)n);
    }
    if (!s->keeps_phase[o->out]) continue;
    const char *name = e->g->strings.at[pm_value_of(e->g, o->out)->name];
    e->phase[o->out] =
        pm_unique(e, *name ? pm_str(e, "%s_phase", pm_identifier(e, name)) : "phase");
    pm_line(e, "u32 %s = 0;", e->phase[o->out]);
  }
  pm_begin(e, "if (threadIdx.x == 0) {");
  for (uint32_t k = 0; k < s->barriers.n; k++) {
    const pm_opid op = s->barriers.at[k];
    const int64_t n = pm_type_size(pm_typeof(e->g, pm_get(e->g, op)->out));
    const int64_t unit = *pm_attr(e->g, op, PM_ATTR_WARPS) ? 4 : 1;
    const int64_t count =
        e->one_expect[pm_get(e->g, op)->out] ? 1 : pm_barrier_arrivals(e->g, op) * unit;
    const long long at = *pm_attr(e->g, op, PM_ATTR_OFFSET);
    const char *name = e->g->strings.at[pm_value_of(e->g, pm_get(e->g, op)->out)->name];
    const char *note = *name ? pm_str(e, " // %s", name) : "";
    if (n <= 8) { /* unrolling a loop takes the compiler longer */
      for (int64_t i = 0; i < n; i++) {
        pm_line(e, "mbarrier_init(smem + %lld, %lld);%s", at + (long long)i * 8, (long long)count,
                i ? "" : note);
      }
    } else {
      pm_line(e, "for (int k = 0; k < %lld; k++) mbarrier_init(smem + %lld + k * 8, %lld);%s",
              (long long)n, at, (long long)count, note);
    }
  }
  for (uint32_t k = 0; k < s->semaphores.n; k++) {
    const pm_opid op = s->semaphores.at[k];
    const long long n = pm_type_size(pm_typeof(e->g, pm_get(e->g, op)->out));
    const long long at = *pm_attr(e->g, op, PM_ATTR_OFFSET);
    pm_line(e, "block_semaphore_init(smem + %lld, %lld);", at, n);
  }
  if (e->arrivals) pm_line(e, "block_semaphore_init(smem + %u, %d);", e->arrivals, N_ARRIVALS);
  if (s->barriers.n) pm_line(e, "mbarrier_init_fence();");
  pm_end(e);
  return PM_OK;
}

/* After the body, where a thread has taken its last tile. Warp 0 speaks for its thread, so other
 * warps that may still signal or wait are awaited. */
static pm_code print_counters_done(pm_gen *e, bool in_warps) {
  const pm_program *p = e->program;
  const uint64_t callers = (uint64_t)p->grid[0] * p->grid[1] * p->grid[2] * e->g->n_threads;
  const char *who = PM_ONE_LANE, *done = "counters_done";
  if (!e->n_counters) return PM_OK;
  if (p->clears_counters && p->n_devices > 1) {
    return pm_fail(e->err, PM_E_NOT_IMPLEMENTED,
                   "cluster launch control and counters of the launch (semaphores, TileScheduler) "
                   "in a kernel on a mesh; use plgpu.nd_loop, or semaphores of an array");
  }
  if (p->clears_counters) return PM_OK;
  if (e->n_counters > e->first_semaphore) {
    who = "if (warp == 0)", done = "counters_done_by_warp";
    if (in_warps) pm_line(e, PM_WARPGROUP_SYNC);
  }
  if (p->shares_grid) { /* as many as there are */
    const char *threads = e->asks && e->g->n_threads > 1 ? pm_str(e, " * %u", e->g->n_threads) : "";
    const char *all = "gridDim.x * gridDim.y * gridDim.z";
    if (!e->asks)
      all = p->cluster[0] > 1 ? pm_str(e, "gridDim.x / %u", p->cluster[0]) : "gridDim.x";
    pm_line(e, "%s %s(counters, %u, %s%s);", e->asks ? who : pm_taker(e, true), done, e->n_counters,
            all, threads);
    return PM_OK;
  }
  if (p->launch.open) {
    pm_line(e, "%s %s(counters, %u, gridDim.x * gridDim.y * gridDim.z * %u);", who, done,
            e->n_counters, e->g->n_threads);
    return PM_OK;
  }
  if (callers > UINT32_MAX) {
    return pm_fail(
        e->err, PM_E_NOT_IMPLEMENTED,
        "TileScheduler, get_global: %llu threads of all blocks are too many; use a smaller "
        "grid and let each block take more tiles",
        (unsigned long long)callers);
  }
  pm_line(e, "%s %s(counters, %u, %uu);", who, done, e->n_counters, (unsigned)callers);
  return PM_OK;
}

/* What threads do between the start, which all share, and the end. */
static pm_code print_work(pm_gen *e) {
  const char *first = pm_str(e, "%u", e->g->n_threads + 1);
  const uint32_t begin = e->out.n;
  if (e->n_section)
    pm_print_arrival(e, pm_str(e, "if (wg == %u) ", e->n_section - 1), "section_leave", first, "");
  pm_find_lane_barriers(e);
  PM_TRY(pm_gen_block(e, 1));
  pm_print_last_wait(e);
  /* the barrier that thread 0 would wait for is left at rest */
  if (e->n_section) pm_print_meeting(e, e->section, "if (wg == 0) ", "section_enter", first, "");
  pm_print_leave(e, begin);
  return PM_OK;
}

static pm_code print_body(pm_gen *e) {
  const pm_graph *g = e->g;
  survey s = {.e = e, .keeps_phase = PM_NEW(e->arena, bool, g->values.n)};
  pm_walk((pm_graph *)g, 1, look, &s); /* the visitor changes nothing */
  e->indent = 1;
  e->first_semaphore = e->n_counters;
  e->n_counters += s.n_words;
  for (uint32_t k = 0; k < e->program->n_params; k++) {
    const pm_val v = g->blocks.at[1].arg + k;
    pm_bind(e, v, pm_name_of(e, v), PM_FORM_SCALAR);
  }
  pm_print_profile_start(e);
  if (s.meets_lanes && e->options->check_waits) PM_TRY(place_arrivals(e));
  PM_TRY(print_barriers(e, &s));
  const bool tmem = pm_has_tmem(e), pairs = tmem && pm_tmem_is_of_pairs(e);
  if (tmem) pm_print_tmem_alloc(e, e->tmem_slot);
  /* no block signals another one, or uses its tensor memory, before they are there */
  if (s.meets_cluster || pairs) {
    pm_line(e, "cluster_sync();");
    /* the other one orders barriers alone */
    if (s.semaphores.n || tmem || e->arrivals) pm_line(e, "block_sync();");
  } else if (s.barriers.n || s.semaphores.n || tmem || e->arrivals) {
    pm_line(e, "block_sync();");
  }
  if (tmem) pm_print_tmem_address(e, e->tmem_slot);
  pm_print_profile_ready(e);
  PM_TRY(print_work(e));
  PM_TRY(print_counters_done(e, s.in_warps));
  pm_print_profile_end(e);
  /* no block may end while another one of its cluster can still reach its shared memory */
  if (s.meets_cluster || pairs) pm_line(e, "cluster_sync();");
  if (tmem) {
    pm_line(e, "block_sync();");
    pm_print_tmem_dealloc(e);
  }
  return PM_OK;
}

/* ---- assembly ---------------------------------------------------------------------------- */

static bool has_word(const char *text, const char *word) {
  const size_t n = strlen(word);
  for (const char *s = text; s && (s = strstr(s, word)); s += n) {
    if ((s == text || !is_word(s[-1])) && !is_word(s[n])) return true;
  }
  return false;
}

static bool is_written(const pm_graph *g, uint32_t param) {
  if (param >= g->n_operands) return true;
  for (uint32_t k = 0; k < g->n_outputs; k++) {
    if (g->alias && g->alias[k] == (int32_t)param) return true;
  }
  return false;
}

static void add_arg(pm_gen *e, pm_arg_kind kind, int32_t param, uint32_t map) {
  struct pm_program_arg *a = &e->program->args[e->program->n_args++];
  a->kind = (uint8_t)kind;
  a->param = param;
  a->map = map;
}

static void print_parameters(pm_gen *e, pm_text *out) {
  const pm_graph *g = e->g;
  pm_program *p = e->program;
  const char *sep = "\n    ";
  p->args = PM_NEW(e->arena, struct pm_program_arg, e->maps.n + p->n_params + g->sizes.n + 4);
  p->n_counters = e->n_counters;
  p->maps = e->maps.at;
  p->n_maps = e->maps.n;
  for (uint32_t k = 0; k < e->maps.n; k++, sep = ",\n    ") {
    if (e->maps.at[k].swizzle == PM_ANY_SWIZZLE) e->maps.at[k].swizzle = 0;
    const bool peers = e->maps.at[k].of == PM_MAP_PEERS;
    const char *type = peers ? pm_str(e, "TensorMaps<%u>", p->n_devices) : "TensorMap";
    pm_putf(out, "%sconst __grid_constant__ %s %s", sep, type, e->map_names.at[k]);
    add_arg(e, PM_ARG_TENSOR_MAP, e->maps.at[k].param, k);
  }
  for (uint32_t k = 0; k < p->n_params; k++) {
    const pm_val v = g->blocks.at[1].arg + k;
    if (!e->param_used[k]) continue;
    pm_putf(out, "%s%s%s* %s", sep, is_written(g, k) ? "" : "const ",
            pm_cpp_type(pm_typeof(g, v)->dtype), e->slot[v].text);
    pm_putf(out, " /* %s */", pm_type_text(e->arena, pm_typeof(g, v)));
    add_arg(e, PM_ARG_POINTER, (int32_t)k, 0);
    sep = ",\n    ";
  }
  for (uint32_t k = 1; k < g->sizes.n; k++) {
    if (!e->size_name[k]) continue;
    pm_putf(out, "%sconst i32 %s", sep, e->size_name[k]);
    add_arg(e, PM_ARG_SIZE, (int32_t)k, 0);
    sep = ",\n    ";
  }
  if (e->n_counters) {
    pm_putf(out, "%su32* counters", sep);
    add_arg(e, PM_ARG_COUNTERS, -1, 0);
    sep = ",\n    ";
  }
  p->n_sites = e->sites.n;
  p->sites = e->sites.at;
  if (e->watches) {
    pm_putf(out, "%sconst __grid_constant__ Watch watch", sep);
    add_arg(e, PM_ARG_WATCH, -1, 0);
    sep = ",\n    ";
  }
  if (e->checks) {
    pm_putf(out, "%su32* sanitizer", sep);
    add_arg(e, PM_ARG_SANITIZER, -1, 0);
    sep = ",\n    ";
  }
  if (e->in_mesh) {
    pm_print_peers(e, out, sep);
    add_arg(e, PM_ARG_PEERS, -1, 0);
  }
}

/* Is the word in the body, or in what stands in front of it? */
static bool is_used(const pm_gen *e, const char *word) {
  for (uint32_t k = 0; k < e->head_vars.n; k++) {
    if (has_word(e->head_vars.at[k].text, word)) return true;
  }
  return has_word(e->out.at, word);
}

static void print_entry(pm_gen *e, pm_text *out) {
  const pm_program *p = e->program;
  /* the ", 1" gives ptxas a register count at entry, without which setmaxnreg is ignored */
  pm_putf(out, "extern \"C\" __global__ void __launch_bounds__(%u, 1)", p->block);
  if (p->cluster[0] * p->cluster[1] * p->cluster[2] > 1) {
    pm_putf(out, " __cluster_dims__(%u, %u, %u)", p->cluster[0], p->cluster[1], p->cluster[2]);
  }
  pm_putf(out, "\n%s(", p->entry);
  print_parameters(e, out);
  pm_put(out, ") {\n");
  pm_stand_in_begin(e, out);
  if (is_used(e, "smem")) pm_put(out, "  const u32 smem = shared_base();\n");
  const char *type = e->reads_again ? "u32" : "const u32";
  if (is_used(e, "wg")) {
    if (e->g->n_threads == 1) pm_put(out, "  constexpr u32 wg = 0;\n");
    else pm_putf(out, "  %s wg = warp_uniform(threadIdx.x >> 7);\n", type);
  }
  if (is_used(e, "tid")) pm_putf(out, "  %s tid = threadIdx.x & 127;\n", type);
  if (is_used(e, "warp")) pm_putf(out, "  %s warp = warp_uniform(threadIdx.x >> 5 & 3);\n", type);
  if (is_used(e, "lane")) pm_putf(out, "  %s lane = threadIdx.x & 31;\n", type);
  for (uint32_t k = 0; k < e->maps.n; k++) {
    if (e->maps.at[k].of == PM_MAP_PEERS) continue;
    pm_putf(out, "  if (threadIdx.x == 0) tensor_map_prefetch(&%s);\n", e->map_names.at[k]);
  }
  for (uint32_t k = 0; k < e->head_vars.n; k++) {
    const pm_head_var *v = &e->head_vars.at[k];
    pm_putf(out, "  const u32 %s = %s;\n", v->name, v->text);
  }
  pm_put(out, e->registers_of_ptx.at);
}

static void print_ptx(pm_gen *e, pm_text *out) {
  bool first = true;
  for (uint32_t k = 0; k < e->n_ptx; k++) {
    const char *text = e->ptx[k].text;
    if (!text) continue;
    if (first) pm_put(out, "// ---- instructions of this program ----\n\n");
    first = false;
    pm_putf(out, "%s\n", text);
  }
}

/* The device functions that the program uses. */
static void print_functions(catalogue *c, const pm_text *ptx, const pm_text *own) {
  read_catalogue(c);
  print_used(c, "types", 5);
  print_used(c, ptx->at, ptx->n);
  print_used(c, own->at, own->n);
}

static void assemble(pm_gen *e) {
  pm_program *p = e->program;
  pm_text head, ptx, own, text;
  pm_text_init(&head, e->arena);
  pm_text_init(&ptx, e->arena);
  pm_text_init(&own, e->arena);
  pm_put(&ptx, "");
  pm_text_init(&text, e->arena);
  print_entry(e, &head);
  catalogue c = {.arena = e->arena, .target = p->machine, .out = &text, .e = e};
  pm_putf(&text, "// %s: grid %u x %u x %u, block %u, %u bytes of dynamic shared memory\n\n",
          p->entry, p->grid[0], p->grid[1], p->grid[2], p->block, p->smem_bytes);
  print_ptx(e, &ptx);
  pm_put(&own, e->inlines.at);
  pm_putn(&own, head.at, head.n);
  if (e->out.n) pm_putn(&own, e->out.at, e->out.n);
  pm_put(&own, "}\n");
  pm_stand_in_constants(e, &text);
  print_functions(&c, &ptx, &own);
  pm_print_names(e, &text, &ptx, &own);
  pm_put_lines(&text, ptx.at);
  pm_putn(&text, own.at, own.n);
  p->text = text.at;
  p->size = text.n;
}

pm_code pm_generate_cuda(const pm_graph *g, const pm_cuda_options *o, pm_program *out,
                         pm_err *err) {
  pm_gen e = {.emitters = pm_emitters,
              .g = g,
              .target = g->target,
              .options = o,
              .program = out,
              .err = err,
              .arena = g->arena};
  memset(out, 0, sizeof *out);
  pm_text_init(&e.out, g->arena);
  pm_text_init(&e.inlines, g->arena);
  pm_put(&e.inlines, "");
  pm_text_init(&e.registers_of_ptx, g->arena);
  pm_put(&e.registers_of_ptx, "");
  e.slot = PM_NEW(g->arena, pm_slot, g->values.n + 1);
  e.summaries = pm_new_summaries(g);
  e.named = PM_NEW(g->arena, bool, g->values.n + 1);
  e.number = pm_number_values(g, g->arena, &e.next_name);
  e.next_copy = PM_NEW(g->arena, pm_opid, g->ops.n + 1);
  e.is_expected = PM_NEW(g->arena, bool, g->ops.n + 1);
  e.one_expect = PM_NEW(g->arena, bool, g->values.n + 1);
  e.uses = PM_NEW(g->arena, uint32_t, g->values.n + 1);
  e.user = PM_NEW(g->arena, pm_opid, g->values.n + 1);
  e.barred = PM_NEW(g->arena, bool, g->values.n + 1);
  e.only_words = PM_NEW(g->arena, bool, g->values.n + 1);
  e.into = PM_NEW(g->arena, const char *, g->values.n + 1);
  e.phase = PM_NEW(g->arena, const char *, g->values.n + 1);
  e.lane_barrier = PM_NEW(g->arena, bool, g->values.n + 1);
  e.made = PM_NEW(g->arena, bool, g->values.n + 1);
  e.uses_inside = PM_NEW(g->arena, uint32_t, g->values.n + 1);
  e.released = PM_NEW(g->arena, bool, g->values.n + 1);
  e.sent = PM_NEW(g->arena, bool, g->values.n + 1);
  e.contents = PM_NEW(g->arena, pm_contents, g->values.n + 1);
  e.reduced = PM_NEW(g->arena, const char *, g->values.n + 1);
  e.in_ptx = PM_NEW(g->arena, bool, g->values.n + 1);
  e.param_used = PM_NEW(g->arena, bool, g->n_operands + g->n_outputs + 1);
  PM_TRY(set_geometry(&e));
  out->entry = entry_name(&e);
  count_uses(&e);
  pm_find_words(&e);
  pm_find_expects(&e);
  PM_TRY(print_body(&e));
  pm_keep_blocks_apart(&e);
  out->pdl = out->pdl && !pm_stands_in(&e);
  assemble(&e);
  return PM_OK;
}
