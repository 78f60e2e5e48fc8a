/* Who touched memory last.
 *
 * The SMEM of each block and each argument that the kernel writes is a region of pages. A page is
 * made when it is touched first; it is a sorted list of marks, each for a run of bytes with one
 * history: the last write, and those who read the bytes since. A new access splits the marks at its
 * ends, is compared with the history of all marks between, takes its place in it, and joins
 * neighbours that became equal. A write ends the history: what is ordered behind it is ordered
 * behind all that it was compared with. A read stands for an earlier one that is ordered before it.
 * Atomic operations are kept among the reads, as they do not conflict with each other.
 *
 * Events and lists lie in two arrays; marks name them by number, 0 is none. They are swept when
 * they have doubled since the last time. Memory is bounded: beyond MOST_BYTES new pages stay
 * without marks, so that races there are not found. */
#include <stdlib.h>

#include "races.h"

enum { MOST_BYTES = 256 << 20, FEW = 4096 };

/* ---- events and lists --------------------------------------------------------------------- */

/* The number of a free entry, of `size` bytes. The first word of a free one is the number of the
 * next; 0: no memory. */
static uint32_t take(shadow *s, pool *p, size_t size) {
  if (p->free) {
    const uint32_t k = p->free;
    memcpy(&p->free, (char *)p->at + k * size, sizeof p->free);
    p->taken++;
    return k;
  }
  if (p->n == p->cap) {
    const uint32_t cap = p->cap ? 2 * p->cap : 64;
    void *at = pm_realloc(p->at, cap * size);
    if (!at) {
      s->no_memory = true;
      return 0;
    }
    s->bytes += (cap - p->cap) * size;
    p->at = at;
    p->cap = cap;
    if (!p->n) p->n = 1; /* 0 is none */
  }
  p->taken++;
  return p->n++;
}

static void give(pool *p, uint32_t k, size_t size) {
  memcpy((char *)p->at + k * size, &p->free, sizeof p->free);
  p->free = k;
}

static since *list_at(const shadow *s, uint32_t k) { return (since *)s->lists.at + k; }

uint32_t pm_shadow_event(shadow *s, const event *e) {
  const uint32_t k = take(s, &s->events, sizeof *e);
  if (k) *pm_shadow_at(s, k) = *e;
  return k;
}

static uint32_t new_since(shadow *s, uint32_t event, uint32_t next) {
  const uint32_t k = take(s, &s->lists, sizeof(since));
  if (k) *list_at(s, k) = (since){.event = event, .next = next};
  return k;
}

static void mark_page(shadow *s, const page *p) {
  for (uint32_t k = 0; k < p->n; k++) {
    pm_shadow_at(s, p->at[k].write)->marked = true;
    for (uint32_t l = p->at[k].since; l && !list_at(s, l)->marked; l = list_at(s, l)->next) {
      list_at(s, l)->marked = true;
      pm_shadow_at(s, list_at(s, l)->event)->marked = true;
    }
  }
}

void pm_shadow_sweep(shadow *s) {
  if (s->events.taken < s->events.live + FEW && s->lists.taken < s->lists.live + FEW) return;
  for (uint32_t k = 0; k < s->n_regions; k++) {
    for (size_t j = 0; j < s->regions[k].n_pages; j++) mark_page(s, &s->regions[k].pages[j]);
  }
  s->events.live = s->lists.live = s->events.free = s->lists.free = 0;
  s->events.taken = s->lists.taken = 0;
  for (uint32_t k = 1; k < s->events.n; k++) {
    event *e = pm_shadow_at(s, k);
    s->events.live += e->marked;
    if (!e->marked) give(&s->events, k, sizeof *e);
    e->marked = false;
  }
  for (uint32_t k = 1; k < s->lists.n; k++) {
    since *l = list_at(s, k);
    s->lists.live += l->marked;
    if (!l->marked) give(&s->lists, k, sizeof *l);
    l->marked = false;
  }
}

/* ---- conflicts ---------------------------------------------------------------------------- */

static bool is_ordered(const touching *x, const event *e, enum view v) {
  return pm_clock_at(x->clock, e->id, v) >= e->time;
}

static enum view needed(const touching *x, const event *e) {
  return !x->engine ? SEEN : e->touch == READ ? DRAINED : FENCED;
}

static void note(conflict *c, uint32_t event, enum view lacks, size_t from, size_t to) {
  if (c->event == event && c->to == from) c->to = to;
  if (!c->event) *c = (conflict){event, (uint8_t)lacks, from, to};
}

static bool compare(touching *x, conflict *c, uint32_t number, size_t from, size_t to) {
  const event *e = pm_shadow_at(x->shadow, number);
  const enum view v = needed(x, e);
  if (!is_ordered(x, e, v)) {
    note(c, number, is_ordered(x, e, SEEN) ? v : SEEN, from, to);
    return false;
  }
  if (v != FENCED || is_ordered(x, e, TOLD)) return true;
  note(&x->told, number, TOLD, from, to);
  return false;
}

static bool is_rewrite(const touching *x, uint32_t write) {
  const event *e = pm_shadow_at(x->shadow, write);
  return x->event->touch == WRITE && x->event->cluster != e->cluster && !is_ordered(x, e, SEEN);
}

static void note_rewrite(shadow *s, uint32_t event, size_t from, size_t to) {
  rewrite *last = s->n_rewrites ? &s->rewrites[s->n_rewrites - 1] : NULL;
  if (last && last->event == event && last->to == from) {
    last->to = to;
    return;
  }
  if (s->n_rewrites == s->cap_rewrites) {
    const uint32_t cap = s->cap_rewrites ? 2 * s->cap_rewrites : 16;
    rewrite *at = pm_realloc(s->rewrites, cap * sizeof *at);
    if (!at) {
      s->no_memory = true;
      return;
    }
    s->rewrites = at;
    s->cap_rewrites = cap;
  }
  s->rewrites[s->n_rewrites++] = (rewrite){event, from, to};
}

static void compare_write(touching *x, uint32_t write, size_t from, size_t to) {
  if (!write || write == x->fine_write) return;
  if (x->write.event && x->write.event != write) return;
  if (is_rewrite(x, write)) {
    note_rewrite(x->shadow, write, from, to);
    return;
  }
  if (compare(x, &x->write, write, from, to)) x->fine_write = write;
}

static void compare_since(touching *x, uint32_t list, size_t from, size_t to) {
  bool fine = true;
  if (!list || list == x->fine_since) return;
  for (uint32_t l = list; l; l = list_at(x->shadow, l)->next) {
    const uint32_t number = list_at(x->shadow, l)->event;
    const uint8_t touch = pm_shadow_at(x->shadow, number)->touch;
    if (x->event->touch == touch) continue; /* a write is never in a list */
    fine &= compare(x, &x->since, number, from, to);
  }
  if (fine) x->fine_since = list;
}

/* ---- histories ---------------------------------------------------------------------------- */

/* Whoever is ordered behind the new access is ordered behind the old one, in every way. */
static bool stands_for(const touching *x, const event *old) {
  if (old->touch == ATOMIC && x->event->touch == READ) return false;
  if (old->id == x->event->id) return true;
  for (enum view v = SEEN; v < VIEWS; v++) {
    if (!is_ordered(x, old, v)) return false;
  }
  return true;
}

static bool is_same(const event *a, const event *b) {
  return a->id == b->id && a->time == b->time && a->i == b->i && a->touch == b->touch &&
         a->first == b->first && a->last == b->last;
}

/* The list with the new access in front. */
static uint32_t grown(touching *x, uint32_t list) {
  shadow *s = x->shadow;
  uint32_t kept[MOST_SINCE], n = 0;
  if (x->grown_to && x->grown_from == list) return x->grown_to;
  x->grown_from = list;
  if (list && is_same(pm_shadow_at(s, list_at(s, list)->event), x->event)) {
    return x->grown_to = list;
  }
  for (uint32_t l = list; l && n < MOST_SINCE - 1; l = list_at(s, l)->next) {
    const uint32_t number = list_at(s, l)->event;
    if (!stands_for(x, pm_shadow_at(s, number))) kept[n++] = number;
  }
  if (!x->number) x->number = pm_shadow_event(s, x->event);
  uint32_t to = 0;
  while (n-- > 0) to = new_since(s, kept[n], to);
  return x->grown_to = x->number ? new_since(s, x->number, to) : 0;
}

static void record(touching *x, mark *k) {
  if (x->event->touch != WRITE) {
    k->since = grown(x, k->since);
    return;
  }
  if (!x->number) x->number = pm_shadow_event(x->shadow, x->event);
  k->write = x->number;
  k->since = 0;
}

/* ---- pages -------------------------------------------------------------------------------- */

/* One more place at position k, which is a copy of what is there. */
static bool insert(shadow *s, page *p, uint32_t k) {
  if (p->n == p->cap) {
    const uint32_t cap = p->cap ? 2 * p->cap : 4;
    mark *at = pm_realloc(p->at, cap * sizeof *at);
    if (!at) {
      s->no_memory = true;
      return false;
    }
    s->bytes += (cap - p->cap) * sizeof *at;
    p->at = at;
    p->cap = cap;
  }
  memmove(p->at + k + 1, p->at + k, (p->n++ - k) * sizeof *p->at);
  return true;
}

/* The mark that begins at byte `at`, after a split where none does; UINT32_MAX: no memory. */
static uint32_t split(shadow *s, page *p, uint32_t at) {
  uint32_t low = 0, high = p->n;
  while (low < high) { /* the first that ends behind `at` */
    const uint32_t middle = (low + high) / 2;
    if (p->at[middle].to <= at) low = middle + 1;
    else high = middle;
  }
  if (low == p->n || at == (low ? p->at[low - 1].to : 0)) return low;
  if (!insert(s, p, low)) return UINT32_MAX;
  p->at[low].to = at;
  return low + 1;
}

/* Neighbours between marks `first` and `end` with one history become one mark. */
static void merge(page *p, uint32_t first, uint32_t end) {
  uint32_t out = first;
  for (uint32_t k = first + 1; k < end; k++) {
    if (p->at[k].write == p->at[out].write && p->at[k].since == p->at[out].since) {
      p->at[out].to = p->at[k].to;
    } else {
      p->at[++out] = p->at[k];
    }
  }
  if (out + 1 == end) return;
  memmove(p->at + out + 1, p->at + end, (p->n - end) * sizeof *p->at);
  p->n -= end - out - 1;
}

static bool begin_page(shadow *s, page *p) {
  if (p->n) return true;
  s->full |= s->bytes > MOST_BYTES;
  if (s->full || (!p->cap && !insert(s, p, 0))) return false;
  p->at[0] = (mark){.to = PAGE};
  p->n = 1;
  return true;
}

static void touch_page(touching *x, page *p, size_t base, uint32_t from, uint32_t to) {
  shadow *s = x->shadow;
  if (!begin_page(s, p)) return;
  const uint32_t first = split(s, p, from), end = first == UINT32_MAX ? first : split(s, p, to);
  if (end == UINT32_MAX) return;
  for (uint32_t k = first; k < end; k++) {
    mark *a = &p->at[k];
    const size_t begin = base + (k == first ? from : p->at[k - 1].to);
    compare_write(x, a->write, begin, base + a->to);
    compare_since(x, a->since, begin, base + a->to);
    record(x, a);
  }
  merge(p, first ? first - 1 : 0, (uint32_t)pm_min(end + 1, p->n));
}

void pm_shadow_touch(touching *x, region *g, size_t from, size_t to) {
  for (size_t at = from; at < to;) {
    const size_t number = at / PAGE, base = number * PAGE, end = pm_min((int64_t)to, base + PAGE);
    if (number >= g->n_pages || x->shadow->no_memory) return;
    touch_page(x, &g->pages[number], base, (uint32_t)(at - base), (uint32_t)(end - base));
    at = end;
  }
}

/* The same for many runs in one pass over the marks. */
static void touch_marks(touching *x, const page *p, size_t base, const run *r, uint32_t n,
                        mark *out, uint32_t *n_out) {
  uint32_t at = 0, i = 0, j = 0, k = 0;
  while (at < PAGE) {
    mark piece = p->at[i];
    const bool inside = j < n && r[j].from <= at;
    const uint32_t limit = j == n ? PAGE : inside ? r[j].to : r[j].from;
    const uint32_t to = (uint32_t)pm_min(piece.to, limit);
    if (inside) {
      compare_write(x, piece.write, base + at, base + to);
      compare_since(x, piece.since, base + at, base + to);
      record(x, &piece);
    }
    piece.to = to;
    if (k && out[k - 1].write == piece.write && out[k - 1].since == piece.since) k--;
    out[k++] = piece;
    if (to == p->at[i].to) i++;
    if (inside && to == r[j].to) j++;
    at = to;
  }
  *n_out = k;
}

static bool want_marks(shadow *s, mark **at, uint32_t *cap, uint32_t n) {
  if (n <= *cap) return true;
  mark *more = pm_realloc(*at, 2 * n * sizeof *more);
  if (!more) {
    s->no_memory = true;
    return false;
  }
  s->bytes += (2 * n - *cap) * sizeof *more;
  *at = more;
  *cap = 2 * n;
  return true;
}

void pm_shadow_touch_runs(touching *x, region *g, size_t number, const run *runs, uint32_t n) {
  shadow *s = x->shadow;
  page *p = &g->pages[number];
  uint32_t made;
  if (number >= g->n_pages || s->no_memory || !begin_page(s, p)) return;
  if (n == 1) {
    touch_page(x, p, number * PAGE, runs->from, runs->to);
    return;
  }
  if (!want_marks(s, &s->marks, &s->cap_marks, p->n + 2 * n)) return;
  touch_marks(x, p, number * PAGE, runs, n, s->marks, &made);
  if (!want_marks(s, &p->at, &p->cap, made)) return;
  memcpy(p->at, s->marks, made * sizeof *p->at);
  p->n = made;
}

void pm_shadow_clear(shadow *s, region *g) {
  (void)s;
  for (size_t k = 0; k < g->n_pages; k++) g->pages[k].n = 0;
}

void pm_shadow_free(shadow *s) {
  for (uint32_t k = 0; s->regions && k < s->n_regions; k++) {
    for (size_t j = 0; j < s->regions[k].n_pages; j++) pm_free(s->regions[k].pages[j].at);
    pm_free(s->regions[k].pages);
  }
  pm_free(s->regions);
  pm_free(s->events.at);
  pm_free(s->lists.at);
  pm_free(s->rewrites);
  pm_free(s->marks);
}
