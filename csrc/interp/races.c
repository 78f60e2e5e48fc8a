/* The race detector's verdicts.
 *
 * Each function of the machine that touches memory says so here: which bytes, for whom, read or
 * written, by which proxy. Nothing is derived from the op table. A plain access is made by its
 * thread, now; one of an engine has the clock that its issuer had when it issued it, and what
 * completes it is a phase, a bulk group or a product. The rows of a view go to the shadow in
 * the order of their strides, so that a transposed tile is as few runs of bytes as any other.
 *
 * Two accesses race if they meet, one of them writes, and the later one is not ordered after the
 * earlier one. What an engine does to SMEM must also come after a proxy fence: the writer's or the
 * issuer's after a plain store, the reader's own after a plain load. In GMEM the generated
 * program has the fence where the copy is issued, so order is enough. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "races.h"

enum { MOST_REPORTS = 1000, FEW_PERIODS = 8 };

/* ---- reports ------------------------------------------------------------------------------ */

static const char *const touch_names[] = {[READ] = "read", [WRITE] = "write", [ATOMIC] = "atomic"};

/* Who it was, as the machine names agents. */
static const char *agent_of(const pm_machine *m, const event *e, char *buf, size_t n) {
  cluster c = {.number = e->cluster % m->grid_size,
               .device = (uint32_t)(e->cluster / m->grid_size)};
  block b = {.cluster = &c};
  thread of = {.block = &b, .index = e->thread}, warp = of;
  int64_t rest = c.number;
  for (uint32_t d = m->n_grid; d-- > 0; rest /= m->grid[d]) c.point[d] = rest % m->grid[d];
  rest = e->block;
  for (uint32_t d = m->n_cluster; d-- > 0; rest /= m->cluster[d]) b.coord[d] = rest % m->cluster[d];
  warp.of = &of;
  warp.warp = (uint32_t)e->warp;
  return pm_vm_agent(m, e->warp < 0 ? &of : &warp, buf, n);
}

/* "[0:64, 3]": from the first to the last of these elements */
static void index_text(const access *mem, int64_t first, int64_t last, char *buf, size_t n) {
  int64_t low[PM_MAX_RANK], high[PM_MAX_RANK];
  bool box = first <= last;
  for (uint32_t d = mem->base_rank; d-- > 0; first /= mem->base_dim[d], last /= mem->base_dim[d]) {
    low[d] = first % mem->base_dim[d];
    high[d] = last % mem->base_dim[d];
    box &= low[d] <= high[d];
  }
  int at = snprintf(buf, n, "[");
  for (uint32_t d = 0; d < mem->base_rank && at < (int)n; d++) {
    if (!box) at += snprintf(buf + at, n - (size_t)at, d ? ", :" : ":");
    else if (low[d] == high[d])
      at += snprintf(buf + at, n - (size_t)at, d ? ", %" PRId64 : "%" PRId64, low[d]);
    else
      at += snprintf(buf + at, n - (size_t)at,
                     d ? ", %" PRId64 ":%" PRId64 : "%" PRId64 ":%" PRId64, low[d], high[d] + 1);
  }
  if (at < (int)n) snprintf(buf + at, n - (size_t)at, mem->base_rank ? "]" : "...]");
}

/* from, to: the bytes of the region that it is about */
static void describe(const pm_machine *m, const event *e, size_t from, size_t to, pm_race_side *s) {
  static const char *const makers[] = {[THREAD] = "",
                                       [LANES] = "",
                                       [TMA] = "TMA, for ",
                                       [TENSOR_CORE] = "the tensor core, for ",
                                       [ST_ASYNC] = "st.async, for ",
                                       [CP_ASYNC] = "cp.async, for "};
  char agent[400];
  s->touch = touch_names[e->touch];
  s->ref = e->mem->name;
  const int64_t at = (int64_t)from - e->first, bytes = e->mem->bytes;
  if (e->single)
    index_text(e->mem, at / bytes, ((int64_t)(to - from) + at - 1) / bytes, s->index,
               sizeof s->index);
  else index_text(e->mem, e->first, e->last, s->index, sizeof s->index);
  snprintf(s->agent, sizeof s->agent, "%s%s", makers[e->maker],
           agent_of(m, e, agent, sizeof agent));
  s->file = m->places[e->i->op].file;
  s->line = m->places[e->i->op].line;
}

static bool is_load(const event *e) { return e->maker == TMA && e->i->mem3; }

/* A load and what else engines do for one agent run in either order: what if the second one was
 * issued first. */
static void put_other_hint(const event *a, const event *b, char *buf, size_t n) {
  const bool same = a->cluster == b->cluster && a->block == b->block && a->thread == b->thread &&
                    a->warp == b->warp;
  const bool engines =
      (a->maker == TMA || a->maker == TENSOR_CORE) && (b->maker == TMA || b->maker == TENSOR_CORE);
  if (!same || !engines || is_load(a) == is_load(b)) return;
  const size_t at = strlen(buf);
  const char *wait = b->committed              ? "the barrier of a commit after it"
                     : b->maker == TENSOR_CORE ? "wgmma_wait()"
                                               : "wait_smem_to_gmem()";
  if (is_load(b)) {
    snprintf(buf + at, n - at,
             "; if the second was issued first, wait for that one on barrier '%s'",
             b->i->mem3->name);
  } else {
    snprintf(buf + at, n - at, "; if the second was issued first, wait for that one: %s", wait);
  }
}

/* Why the second access is not ordered after the first. */
static void put_hint(const pm_machine *m, const event *a, const event *b, enum view lacks,
                     char *buf, size_t n) {
  static const char reader[] = "only the thread that issued it can, and then tell others";
  const bool tma = b->maker == TMA;
  switch (lacks) {
    case SAME_BYTES:
      snprintf(buf, n, "both write the same bytes, so their order makes no difference here");
      return;
    case BY_AUTHOR:
      snprintf(buf, n, "the fence between them was inserted: call plgpu.commit_smem() there");
      return;
    case FENCED:
      snprintf(buf, n, "no plgpu.commit_smem() makes the store visible to %s",
               tma ? "TMA" : "the tensor core");
      return;
    case DRAINED:
      snprintf(buf, n, "no proxy fence follows the load, which may complete late");
      return;
    default: break;
  }
  if (a->cluster / m->grid_size != b->cluster / m->grid_size) {
    snprintf(buf, n, "devices are not ordered, unless a semaphore orders them");
    return;
  }
  if (a->cluster != b->cluster) {
    snprintf(buf, n, "points of the grid are not ordered, unless a semaphore orders them");
    return;
  }
  switch (pm_race_kind(m->races, a->id)) {
    case COPIES: snprintf(buf, n, "wait for the first on barrier '%s'", a->i->mem3->name); break;
    case REMOTE: snprintf(buf, n, "wait for the first on barrier '%s'", a->i->mem2->name); break;
    case STORES:
      if (a->maker == CP_ASYNC) {
        snprintf(buf, n, "wait for the first: wait_gmem_to_smem(); %s", reader);
        return;
      }
      snprintf(buf, n, "wait for the first: wait_smem_to_gmem(), not with wait_read_only=True; %s",
               reader);
      break;
    case STORE_READS:
      snprintf(buf, n, "wait for the first: wait_smem_to_gmem(); %s", reader);
      break;
    case PRODUCTS:
      if (a->committed) snprintf(buf, n, "wait for the first: the barrier of a commit after it");
      else snprintf(buf, n, "wait for the first: wgmma_wait(); %s", reader);
      break;
    default:
      if (b->committed) {
        snprintf(buf, n, "issue the product after the first, or wait for it before: %s",
                 "the barrier of a commit after the product");
      } else if (b->maker == TENSOR_CORE) {
        snprintf(buf, n, "wgmma_wait() before the first, or issue the product after it");
      } else if (b->maker == CP_ASYNC) {
        snprintf(buf, n, "wait_gmem_to_smem() before the first, or issue the copy after it");
      } else if (tma && b->i->mem3) {
        snprintf(buf, n, "wait on barrier '%s' before the first, or issue the copy after it",
                 b->i->mem3->name);
      } else if (b->maker == ST_ASYNC) {
        snprintf(buf, n, "wait on barrier '%s' before the first, or issue the store after it",
                 b->i->mem2->name);
      } else if (tma) {
        snprintf(buf, n, "wait_smem_to_gmem() before the first, or issue the copy after it");
      } else {
        snprintf(buf, n, "nothing orders them: use a barrier or a semaphore");
      }
  }
  put_other_hint(a, b, buf, n);
}

static bool is_known(races *r, pm_opid first, pm_opid second) {
  for (uint32_t k = 0; k < r->n_reported; k++) {
    if (r->reported[k].first == first && r->reported[k].second == second) return true;
  }
  if (r->n_reported == MOST_REPORTS) return true;
  if (r->n_reported == r->cap_reported) {
    const uint32_t cap = r->cap_reported ? 2 * r->cap_reported : 8;
    reported *at = pm_realloc(r->reported, cap * sizeof *at);
    if (!at) return r->no_memory = true;
    r->reported = at;
    r->cap_reported = cap;
  }
  r->reported[r->n_reported++] = (reported){first, second};
  return false;
}

/* "'tile' in SMEM, [0:64]: write and read ...", and both accesses */
static void put_text(pm_race *x, char *buf, size_t n) {
  const pm_race_side *a = &x->first, *b = &x->second;
  char place[2][600] = {"", ""};
  for (int k = 0; k < 2; k++) {
    const pm_race_side *s = k ? b : a;
    if (s->file) snprintf(place[k], sizeof place[k], "\n    at %s:%u", s->file, s->line);
  }
  char other[200] = "";
  if (strcmp(a->ref, b->ref)) snprintf(other, sizeof other, " and '%s'", b->ref);
  snprintf(buf, n,
           "'%s'%s in %s, %s: %s and %s are not ordered\n  %s of %s%s by %s%s\n  %s of %s%s by "
           "%s%s\n  %s",
           a->ref, other, x->space, x->index, a->touch, b->touch, a->touch, a->ref, a->index,
           a->agent, place[0], b->touch, b->ref, b->index, b->agent, place[1], x->hint);
}

void pm_race_note(pm_machine *m, pm_opid op, const char *fmt, ...) {
  char text[4096] = "not portable to JAX: ";
  const size_t at = strlen(text);
  va_list ap;
  if (!m->races || !m->options.strict || is_known(m->races, op, 0)) return;
  va_start(ap, fmt);
  vsnprintf(text + at, sizeof text - at, fmt, ap);
  va_end(ap);
  if (m->options.note) {
    m->options.note(m->options.race_ctx, text, m->places[op].file, m->places[op].line);
  }
}

void pm_race_check_stores(pm_machine *m, const thread *t) {
  for (uint32_t w = 0; w <= (m->has_warps && !t->of ? WARPS : 0); w++) {
    const thread *owner = w ? &pm_vm_warps(m, t)[w - 1] : t;
    const agent_order *o = &m->races->agents[owner - m->threads];
    const uint32_t id = pm_race_agent_id(m, STORE_READS, owner);
    if (o->stores <= pm_clock_at(pm_race_clock(m, t), id, SEEN)) continue;
    pm_race_note(m, o->store,
                 "its thread ends without a wait for this copy (wait_smem_to_gmem(), or "
                 "wait_gmem_to_smem() of one without a barrier). Here the block waits for it");
  }
}

static pm_race race_of(const tracker *x, const conflict *c) {
  pm_machine *m = x->m;
  const event *a = pm_shadow_at(&m->races->shadow, c->event), *b = &x->event;
  const bool tmem = b->mem->space == PM_TMEM;
  pm_race race = {.space = tmem ? "TMEM" : b->mem->space == PM_SMEM ? "SMEM" : "GMEM"};
  describe(m, a, c->from, c->to, &race.first);
  describe(m, b, c->from, c->to, &race.second);
  const int64_t at = x->low - x->base, bytes = b->mem->bytes;
  race.from = pm_max(0, (int64_t)c->from + at);
  race.to = (int64_t)c->to + at;
  if (tmem) {
    const long long first = (long long)b->mem->tmem->offset;
    snprintf(race.index, sizeof race.index, "columns %lld to %lld", race.from / 4 - first,
             (race.to - 1) / 4 - first);
    snprintf(race.hint, sizeof race.hint,
             "order them by a barrier with orders_tensor_core=True: tcgen05_commit_arrive after a "
             "product or copy; wait_load_tmem after a load, commit_tmem after a store, then "
             "barrier_arrive");
    return race;
  }
  index_text(b->mem, race.from / bytes, (race.to - 1) / bytes, race.index, sizeof race.index);
  put_hint(m, a, b, c->lacks, race.hint, sizeof race.hint);
  return race;
}

static void note_conflict(const tracker *x, const conflict *c) {
  if (!c->event || !x->m->options.strict) return;
  pm_race race = race_of(x, c);
  put_text(&race, race.text, sizeof race.text);
  pm_race_note(x->m, x->event.i->op, "%s", race.text);
}

static step deliver(pm_machine *m, pm_race *race) {
  put_text(race, race->text, sizeof race->text);
  if (m->options.race) m->options.race(m->options.race_ctx, race);
  if (!m->options.race_raises) return STEP_NEXT;
  pm_fail(m->err, PM_E_RACE, "RACE DETECTED on %s", race->text);
  if (race->second.file) pm_err_at(m->err, race->second.file, race->second.line);
  return STEP_FAIL;
}

static step report(const tracker *x, const conflict *c) {
  pm_machine *m = x->m;
  if (!c->event) return STEP_NEXT;
  const event *a = pm_shadow_at(&m->races->shadow, c->event), *b = &x->event;
  if (is_known(m->races, a->i->op, b->i->op)) return STEP_NEXT;
  pm_race race = race_of(x, c);
  return deliver(m, &race);
}

/* ---- an access ---------------------------------------------------------------------------- */

/* Before the thread, or one that it learnt from, has waited for the kernels before this one. They
 * may still write what it reads, and read or write what it writes. */
static step report_early(tracker *x) {
  pm_machine *m = x->m;
  const event *e = &x->event;
  const int64_t bytes = e->mem->bytes;
  if (is_known(m->races, UINT32_MAX, e->i->op)) return STEP_NEXT;
  pm_race race = {.space = "GMEM",
                  .from = e->single ? (int64_t)x->from : e->first * bytes,
                  .to = e->single ? (int64_t)x->to : (e->last + 1) * bytes,
                  .hint = "call plgpu.griddepcontrol_wait() before the second"};
  describe(m, e, x->from, x->to, &race.second);
  race.first = race.second;
  race.first.touch = touch_names[WRITE];
  race.first.file = NULL;
  race.first.line = 0;
  snprintf(race.first.agent, sizeof race.first.agent, "kernels that were launched earlier");
  snprintf(race.index, sizeof race.index, "%s", race.second.index);
  return deliver(m, &race);
}

/* ---- the end of a launch ------------------------------------------------------------------ */

typedef struct ended {
  pm_machine *m;
  uint32_t device;
  step result;
} ended;

/* What another device wrote to memory of this one, whose kernel may have ended by then. (What it
 * reads may be memory that only such kernels use.) */
static void check_ended(void *ctx, const event *e, size_t from, size_t to) {
  ended *x = ctx;
  pm_machine *m = x->m;
  if (e->touch == READ || x->result == STEP_FAIL) return;
  if (e->cluster / m->grid_size == x->device) return;
  if (pm_clock_at(&m->races->ends[x->device], e->id, SEEN) >= e->time) return;
  if (is_known(m->races, e->i->op, UINT32_MAX)) return;
  const int64_t bytes = e->mem->bytes;
  pm_race race = {.space = "GMEM",
                  .from = (int64_t)from,
                  .to = (int64_t)to,
                  .hint = "let a thread of that device wait for a signal that follows the first"};
  describe(m, e, from, to, &race.first);
  race.second = race.first;
  race.second.touch = touch_names[READ];
  race.second.file = NULL;
  race.second.line = 0;
  const int n =
      snprintf(race.second.agent, sizeof race.second.agent, "what follows the kernel on device ");
  pm_vm_put_device(m, x->device, race.second.agent + n, sizeof race.second.agent - (size_t)n);
  index_text(e->mem, race.from / bytes, (race.to - 1) / bytes, race.index, sizeof race.index);
  x->result = deliver(m, &race);
}

/* The host may read the memory of a device as soon as the kernel there has ended. */
step pm_race_end_launch(pm_machine *m) {
  races *r = m->races;
  ended x = {.m = m, .result = STEP_NEXT};
  for (uint32_t k = 0; r->ends && k < m->n_buffers; k++) {
    const region *g = &r->shadow.regions[m->n_clusters * m->n_blocks + r->root[k]];
    x.device = k / m->n_args;
    if (r->root[k] == k && g->pages) pm_shadow_visit(&r->shadow, g, check_ended, &x);
  }
  return x.result;
}

/* ---- an access, continued ----------------------------------------------------------------- */

/* Where the bytes of a block or an argument begin; false: nobody writes to the argument. */
static bool find_region(tracker *x, const thread *t, const access *mem, const char *base) {
  const pm_machine *m = x->m;
  const uint32_t blocks = m->n_clusters * m->n_blocks;
  x->base = base;
  if (mem->space == PM_GMEM) {
    const uint32_t at = pm_vm_owner(m, mem, base) * m->n_args + mem->base;
    x->region = &m->races->shadow.regions[blocks + m->races->root[at]];
    x->low = base;
    return x->region->pages;
  }
  const block *b = t->block;
  if (mem->space == PM_TMEM) {
    if (b->tmem != base) b = b->cluster->blocks;
    while (b->tmem != base) b++;
    x->region = &m->races->shadow.regions[blocks + m->n_buffers + (uint32_t)(b - m->blocks)];
    x->low = base;
    return true;
  }
  if (base < b->smem || base >= b->smem + m->smem_bytes) b = b->cluster->blocks;
  while (base < b->smem || base >= b->smem + m->smem_bytes) b++;
  x->region = &m->races->shadow.regions[b - m->blocks];
  x->low = b->smem;
  return true;
}

/* clock: what is ordered before it. */
static bool begin(tracker *x, pm_machine *m, const thread *t, const instr *i, const located *s,
                  touch touch, const vclock *clock) {
  const access *mem = s->mem;
  x->m = m;
  x->from = x->to = x->n_runs = 0;
  x->lowest = x->highest = NULL;
  x->region = NULL;
  x->early =
      m->overlaps_kernels && mem->space == PM_GMEM && !pm_clock_at(clock, EARLIER_KERNELS, SEEN);
  if (mem->space == PM_ACC || (!find_region(x, t, mem, s->base) && !x->early)) return false;
  pm_shadow_sweep(&m->races->shadow);
  m->races->shadow.n_rewrites = 0;
  x->event =
      (event){.i = i,
              .mem = mem,
              .first = 0,
              .last = -1,
              .cluster = t->block->cluster->number + t->block->cluster->device * m->grid_size,
              .block = (uint16_t)(t->block - t->block->cluster->blocks),
              .thread = (uint8_t)t->index,
              .warp = t->of ? (int8_t)t->warp : -1,
              .touch = touch};
  x->touching = (touching){.shadow = &m->races->shadow,
                           .event = &x->event,
                           .clock = clock,
                           .others = m->grid_size * m->n_devices > 1};
  return true;
}

static void set_maker(tracker *x, maker maker, uint32_t id, uint32_t time) {
  x->event.maker = maker;
  x->event.id = id;
  x->event.time = time;
  x->touching.engine = x->event.mem->space == PM_SMEM && (maker == TMA || maker == TENSOR_CORE);
}

static bool begin_plain(tracker *x, pm_machine *m, const thread *t, const instr *i,
                        const located *s, touch touch, maker maker) {
  const vclock *c = pm_race_clock(m, t);
  const uint32_t id = pm_race_agent_id(m, OWN, t);
  if (!begin(x, m, t, i, s, touch, c)) return false;
  set_maker(x, maker, id, pm_clock_at(c, id, SEEN));
  return true;
}

static void tell_touched(const tracker *x) {
  const event *e = &x->event;
  const int64_t at = x->low - x->base;
  const pm_touch t = {.op = e->i->op,
                      .param = e->mem->space == PM_GMEM ? (int32_t)e->mem->base : -1,
                      .use = e->mem,
                      .reads = e->touch != WRITE,
                      .writes = e->touch != READ,
                      .engine = e->maker == TMA || e->maker == TENSOR_CORE,
                      .from = (int64_t)x->from + at,
                      .to = (int64_t)x->to + at};
  x->m->options.touched(x->m->options.touched_ctx, &t);
}

static void flush_runs(tracker *x) {
  if (x->n_runs) {
    pm_shadow_touch_runs(&x->touching, x->region, x->page, x->runs, x->n_runs);
  }
  x->n_runs = 0;
}

/* The run of bytes is whole: it waits for others of its page. */
static void end_run(tracker *x) {
  const size_t page = x->from / PAGE;
  if (x->from == x->to || !x->region->pages) return;
  if (x->m->options.touched) tell_touched(x);
  const uint32_t from = (uint32_t)(x->from - page * PAGE), n = x->n_runs;
  if (n && (page != x->page || from < x->runs[n - 1].to || n == MOST_RUNS)) flush_runs(x);
  if (x->to > (page + 1) * PAGE) {
    flush_runs(x);
    pm_shadow_touch(&x->touching, x->region, x->from, x->to);
    return;
  }
  x->page = page;
  x->runs[x->n_runs++] = (run){from, (uint32_t)(x->to - page * PAGE)};
}

static void flush(tracker *x) {
  end_run(x);
  flush_runs(x);
}

static void add(tracker *x, const char *at, size_t bytes) {
  const size_t from = (size_t)(at - x->low);
  if (from != x->to) {
    end_run(x);
    x->from = from;
  }
  x->to = from + bytes;
}

/* What is there before a store that is about to be made. */
static void keep_old(races *r, const tracker *x) {
  const shadow *s = &r->shadow;
  size_t bytes = 0, at = 0;
  for (uint32_t k = 0; k < s->n_rewrites; k++) bytes += s->rewrites[k].to - s->rewrites[k].from;
  if (bytes > r->old_bytes) {
    char *old = pm_realloc(r->old, bytes);
    if (!old) {
      r->no_memory = true;
      return;
    }
    r->old = old;
    r->old_bytes = bytes;
  }
  r->storing = *x;
  for (uint32_t k = 0; k < s->n_rewrites; k++) {
    const rewrite *w = &s->rewrites[k];
    memcpy(r->old + at, x->low + w->from, w->to - w->from);
    at += w->to - w->from;
  }
}

static step end(tracker *x) {
  races *r = x->m->races;
  flush(x);
  if (x->early && x->to && report_early(x) == STEP_FAIL) return STEP_FAIL;
  if (r->shadow.n_rewrites) keep_old(r, x);
  if (r->no_memory || r->shadow.no_memory) {
    return pm_fail(x->m->err, PM_E_MEMORY, "no memory to look for races"), STEP_FAIL;
  }
  const touching *t = &x->touching;
  if (!t->write.event && !t->since.event && !t->by_author.event) return STEP_NEXT;
  note_conflict(x, &t->by_author);
  if (report(x, &t->write) == STEP_FAIL) return STEP_FAIL;
  return report(x, &t->since);
}

step pm_race_stored(pm_machine *m) {
  races *r = m->races;
  size_t at = 0;
  conflict c = {0};
  for (uint32_t k = 0; k < r->shadow.n_rewrites; k++) {
    const rewrite *w = &r->shadow.rewrites[k];
    const bool same = !memcmp(r->old + at, r->storing.low + w->from, w->to - w->from);
    if (!c.event || !same) c = (conflict){w->event, same ? SAME_BYTES : SEEN, w->from, w->to};
    if (!same) break;
    at += w->to - w->from;
  }
  r->shadow.n_rewrites = 0;
  if (c.lacks == SEEN) return report(&r->storing, &c);
  note_conflict(&r->storing, &c);
  return STEP_NEXT;
}

/* ---- elements ----------------------------------------------------------------------------- */

bool pm_race_begin_elements(tracker *x, pm_machine *m, const thread *t, const instr *i,
                            const located *s, int touch) {
  return begin_plain(x, m, t, i, s, touch, THREAD);
}

void pm_race_element(tracker *x, const char *at, size_t bytes) {
  if (!x->lowest || at < x->lowest) x->lowest = at;
  if (at + bytes > x->highest) x->highest = at + bytes;
  add(x, at, bytes);
}

step pm_race_end_elements(tracker *x) {
  const int64_t bytes = x->event.mem->bytes;
  if (x->lowest) {
    x->event.first = (x->lowest - x->base) / bytes;
    x->event.last = (x->highest - x->base) / bytes - 1;
  }
  event *e = x->touching.number ? pm_shadow_at(x->touching.shadow, x->touching.number) : NULL;
  if (e) { /* some is in the shadow */
    e->first = x->event.first;
    e->last = x->event.last;
  }
  return end(x);
}

static int by_place(const void *a, const void *b) {
  const char *x = *(const char *const *)a, *y = *(const char *const *)b;
  return (x > y) - (x < y);
}

/* Places in rising order, by the digits of their distances from the lowest. */
static void sort_places(const char **at, const char **to, uint32_t n) {
  enum { BITS = 11, DIGITS = 1 << BITS };
  const char *low = at[0], *high = at[0], **from = at;
  if (n < DIGITS / 8) {
    qsort(at, n, sizeof *at, by_place);
    return;
  }
  for (uint32_t k = 1; k < n; k++) {
    if (at[k] < low) low = at[k];
    if (at[k] > high) high = at[k];
  }
  for (uint32_t shift = 0; (uint64_t)(high - low) >> shift; shift += BITS) {
    uint32_t count[DIGITS] = {0};
    for (uint32_t k = 0; k < n; k++) count[(uint64_t)(from[k] - low) >> shift & (DIGITS - 1)]++;
    for (uint32_t d = 0, sum = 0; d < DIGITS; d++) {
      const uint32_t here = count[d];
      count[d] = sum;
      sum += here;
    }
    for (uint32_t k = 0; k < n; k++) {
      to[count[(uint64_t)(from[k] - low) >> shift & (DIGITS - 1)]++] = from[k];
    }
    const char **other = from;
    from = to;
    to = other;
  }
  if (from != at) memcpy(at, from, n * sizeof *at);
}

const char **pm_race_places(pm_machine *m, int64_t n) {
  races *r = m->races;
  if ((size_t)n > r->cap_places) {
    const char **more = pm_realloc(r->places, 2 * (size_t)n * sizeof *more);
    if (!more) return r->no_memory = true, NULL;
    r->places = more;
    r->cap_places = (size_t)n;
  }
  return r->places;
}

/* Elements at places in any order, some perhaps several times. */
step pm_race_end_places(tracker *x, uint32_t n, bool rising) {
  races *r = x->m->races;
  const size_t bytes = x->event.mem->bytes;
  if (!rising) sort_places(r->places, r->places + r->cap_places, n);
  for (uint32_t k = 0; k < n; k++) {
    if (!k || r->places[k] != r->places[k - 1]) pm_race_element(x, r->places[k], bytes);
  }
  return pm_race_end_elements(x);
}

/* ---- views -------------------------------------------------------------------------------- */

/* The same runs of each period of a range. */
typedef struct periods {
  run runs[MOST_CUTS];
  uint32_t n, period;
  size_t bytes; /* from the first byte of the first period to the last one of the last */
} periods;

/* The outermost loop that repeats few runs at a short distance, and the runs; the number of loops
 * outside of it, r->n: there is none that is worth it. */
static uint32_t find_periods(const runs *r, periods *p) {
  size_t n = 1, span = r->bytes;
  uint32_t best = r->n;
  for (uint32_t d = r->n; d-- > 0;) {
    if (r->step[d] < (int64_t)span || r->step[d] > MOST_PERIOD || n > MOST_CUTS) break;
    span += (size_t)(r->step[d] * (r->size[d] - 1));
    if (r->size[d] >= FEW_PERIODS) {
      best = d;
      p->n = (uint32_t)n;
      p->bytes = span;
    }
    n *= (size_t)r->size[d];
  }
  if (best == r->n) return best;
  runs inner = {.n = r->n - best - 1, .bytes = r->bytes, .at = r->at};
  memcpy(inner.size, r->size + best + 1, inner.n * sizeof *inner.size);
  memcpy(inner.step, r->step + best + 1, inner.n * sizeof *inner.step);
  p->period = (uint32_t)r->step[best];
  for (uint32_t k = 0; k < p->n; k++, pm_vm_next_run(&inner)) {
    const uint32_t from = (uint32_t)(inner.at - r->at);
    p->runs[k] = (run){from, from + (uint32_t)r->bytes};
  }
  return best;
}

/* Loops over equally spaced bytes become one. */
static void join_loops(runs *r) {
  for (uint32_t d = r->n; d-- > 1;) {
    if (r->step[d - 1] != r->step[d] * r->size[d]) continue;
    r->size[d - 1] *= r->size[d];
    r->step[d - 1] = r->step[d];
    r->n--;
    memmove(r->size + d, r->size + d + 1, (r->n - d) * sizeof *r->size);
    memmove(r->step + d, r->step + d + 1, (r->n - d) * sizeof *r->step);
  }
}

static void add_whole(tracker *x, const located *s) {
  periods p;
  runs r;
  pm_vm_begin_runs(s, &r);
  join_loops(&r);
  const uint32_t outer = x->m->options.touched || !x->region->pages ? r.n : find_periods(&r, &p);
  if (outer == r.n) {
    do add(x, r.at, r.bytes);
    while (pm_vm_next_run(&r));
    return;
  }
  flush(x);
  r.n = outer;
  do {
    x->from = (size_t)(r.at - x->low);
    x->to = x->from + p.bytes;
    pm_shadow_touch_periods(&x->touching, x->region, x->from, x->to, p.period, p.runs, p.n);
  } while (pm_vm_next_run(&r));
  x->from = x->to;
}

/* Elements from <= k < to in row-major order. */
static void add_part(tracker *x, const located *s, int64_t from, int64_t to) {
  const access *mem = s->mem;
  for (int64_t k = from, n; k < to; k += n) {
    const uint32_t last = mem->n_loops - 1u;
    int64_t rest = k, at = 0;
    n = 1;
    for (uint32_t d = mem->n_loops; d-- > 0; rest /= mem->loop_size[d]) {
      at += rest % mem->loop_size[d] * mem->loop_stride[d];
    }
    if (mem->loop_stride[last] == 1) {
      n = pm_min(to - k, mem->loop_size[last] - k % mem->loop_size[last]);
    }
    add(x, s->at + at * mem->bytes, (size_t)(n * mem->bytes));
  }
}

/* What is inside, of a view that overhangs. */
static void add_inside(tracker *x, const located *s, bool strict) {
  const access *mem = s->mem;
  int64_t index[PM_MAX_RANK] = {0};
  for (int64_t k = 0; k < mem->n; k++) {
    const char *at = pm_vm_element(s, strict, index);
    if (at) pm_race_element(x, at, mem->bytes);
    for (uint32_t d = mem->rank; d-- > 0;) {
      if (++index[d] < mem->dim[d]) break;
      index[d] = 0;
    }
  }
}

static step add_view(tracker *x, const located *s, int64_t from, int64_t to, bool strict) {
  const access *mem = s->mem;
  if (!s->inside) {
    add_inside(x, s, strict);
    return pm_race_end_elements(x);
  }
  x->event.first = x->event.last = s->offset;
  if (mem->n == 1 && to - from == 1 && mem->space != PM_TMEM) {
    x->event.single = true;
    x->event.first = x->event.last = x->base - x->low;
    add(x, s->at, mem->bytes);
    return end(x);
  }
  for (uint32_t k = 0; k < mem->n_loops; k++) {
    x->event.last += (mem->loop_size[k] - 1) * mem->loop_stride[k];
  }
  if (from == 0 && to == mem->n) add_whole(x, s);
  else add_part(x, s, from, to);
  return end(x);
}

step pm_race_plain(pm_machine *m, const thread *t, const instr *i, const located *s, int touch,
                   int maker) {
  tracker x;
  if (!s->base || !begin_plain(&x, m, t, i, s, touch, maker)) return STEP_NEXT;
  return add_view(&x, s, 0, s->mem->n, true);
}

/* ---- engines ------------------------------------------------------------------------------ */

static bool begin_engine(tracker *x, pm_machine *m, const task *k, const located *s, int touch) {
  const bool smem = s->mem->space == PM_SMEM;
  uint32_t id, time;
  maker maker = TMA;
  if (!begin(x, m, k->issuer, k->i, s, touch, &k->issued)) return false;
  if (k->kind == TASK_MMA || k->kind == TASK_TENSOR) {
    maker = TENSOR_CORE;
    id = pm_race_agent_id(m, PRODUCTS, k->issuer);
    time = k->number;
  } else if (k->i->lowered) {
    maker = LANES;
    id = pm_race_agent_id(m, OWN, k->issuer);
    time = pm_clock_at(&k->issued, id, SEEN);
  } else if (k->kind == TASK_FETCH) {
    maker = CP_ASYNC;
    id = pm_race_agent_id(m, STORES, k->owner);
    time = (uint32_t)k->group + 1;
  } else if (k->kind == TASK_STORE) {
    id = pm_race_agent_id(m, smem ? STORE_READS : STORES, k->owner);
    time = (uint32_t)k->group + 1;
  } else {
    maker = k->gmem.mem ? TMA : ST_ASYNC;
    id = pm_race_barrier_id(m, maker == TMA ? COPIES : REMOTE, k->barrier);
    time = pm_race_open_phase(m, k->barrier);
  }
  set_maker(x, maker, id, time);
  x->event.committed = k->kind == TASK_TENSOR;
  return true;
}

step pm_race_engine(pm_machine *m, const task *k, const located *s, int touch) {
  int64_t from = 0, to = s->mem->n;
  tracker x;
  if (!begin_engine(&x, m, k, s, touch)) return STEP_NEXT;
  if (k->kind == TASK_LOAD && k->gmem.mem) from = k->from, to = k->to;
  return add_view(&x, s, from, to, false);
}

/* n rows of a view, those that exist; at: the first bytes of each, NULL: it does not. */
step pm_race_rows(pm_machine *m, const task *k, const located *s, char *const *at, int64_t n,
                  int touch) {
  const int64_t columns = s->mem->dim[1], bytes = columns * s->mem->bytes;
  tracker x;
  if (!begin_engine(&x, m, k, s, touch)) return STEP_NEXT;
  for (int64_t r = 0; r < n; r++) {
    if (!at[r]) continue;
    pm_race_element(&x, at[r], (size_t)bytes);
  }
  return pm_race_end_elements(&x);
}

/* The word that BROADCAST_TILE writes to a block; t: who writes it there. */
step pm_race_hand(pm_machine *m, const thread *t, const instr *i, const located *s,
                  const barrier *b) {
  const maker maker = m->n_blocks > 1 ? ST_ASYNC : THREAD;
  tracker x;
  if (!begin_plain(&x, m, t, i, s, WRITE, maker)) return STEP_NEXT;
  if (m->n_blocks > 1) {
    x.event.id = pm_race_barrier_id(m, REMOTE, b);
    x.event.time = pm_race_open_phase(m, b);
  }
  return add_view(&x, s, 0, s->mem->n, true);
}

/* ---- tensor memory -------------------------------------------------------------------------- */

/* Its columns are bytes: what two accesses have in common does not depend on the lanes. */
static step add_columns(tracker *x, const tmem_place *p) {
  x->event.first = 0;
  x->event.last = -1; /* elements are not what it is about */
  add(x, p->block->tmem + p->from * 4, (size_t)(p->width * 4));
  return end(x);
}

step pm_race_tmem(pm_machine *m, const thread *t, const instr *i, const tmem_place *p, int touch) {
  const located s = {.mem = p->mem, .base = p->block->tmem};
  tracker x;
  if (!begin_plain(&x, m, t, i, &s, touch, THREAD)) return STEP_NEXT;
  if (touch == READ) {
    set_maker(&x, THREAD, pm_race_agent_id(m, LOADS, t), pm_race_next_loads(m, t));
  }
  return add_columns(&x, p);
}

step pm_race_tensor(pm_machine *m, const task *k, const tmem_place *p, int touch) {
  const located s = {.mem = p->mem, .base = p->block->tmem};
  tracker x;
  if (!begin(&x, m, k->issuer, k->i, &s, touch, &k->issued)) return STEP_NEXT;
  set_maker(&x, TENSOR_CORE, pm_race_agent_id(m, PRODUCTS, k->issuer), k->number);
  return add_columns(&x, p);
}
