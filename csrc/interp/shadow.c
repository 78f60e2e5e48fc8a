/* Who touched memory last.
 *
 * The SMEM of each block and each argument that the kernel writes is a region of pages. A page is
 * made when it is touched first; it is a sorted list of marks, each for a run of bytes with one
 * history: the last write, and those who read the bytes since. A new access splits the marks at its
 * ends, is compared with the history of all marks between, takes its place in it, and joins
 * neighbours that became equal. A write ends the history: what is ordered after it is ordered
 * after all that it was compared with. A read stands for an earlier one that is ordered before it.
 * Atomic operations are kept among the reads, as they do not conflict with each other.
 *
 * A strided access touches the same bytes of every period of a range. The history of such a range
 * is a comb: the marks of one period, from a multiple of the period in the region, so that a mark
 * with a comb can be split anywhere and several pages share one comb. A comb never changes. Where
 * an access with one period meets a comb with another, the result has their least common multiple;
 * if that is too long, or the range too short, the range gets marks of its own.
 *
 * Events, lists and combs lie in arrays; marks name them by number, 0 is none. They are swept when
 * they have doubled since the last time. Memory is bounded: beyond MOST_BYTES new pages stay
 * without marks, so that races there are not found. */
#include <stdlib.h>

#include "races.h"

enum { MOST_BYTES = 256 << 20, FEW = 4096, FEW_BYTES = 8 << 20 };

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

static bool is_same(const event *a, const event *b) {
  return a->id == b->id && a->time == b->time && a->i == b->i && a->touch == b->touch &&
         a->first == b->first && a->last == b->last;
}

/* That of an access that is being made. Loops over elements have one for many of them. */
static uint32_t number_of(touching *x) {
  shadow *s = x->shadow;
  const event *e = x->event;
  if (x->number) return x->number;
  if (!e->single) return x->number = pm_shadow_event(s, e);
  uint32_t *k = &s->recent[((size_t)e->i / sizeof *e->i + e->id) % RECENT];
  if (!*k || !is_same(pm_shadow_at(s, *k), e)) *k = pm_shadow_event(s, e);
  return x->number = *k;
}

static uint32_t new_since(shadow *s, uint32_t event, uint32_t next) {
  const uint32_t k = take(s, &s->lists, sizeof(since));
  if (k) *list_at(s, k) = (since){.event = event, .next = next};
  return k;
}

/* NULL: the bytes of the mark have one history. */
static comb *comb_of(const shadow *s, const mark *k) {
  return k->write & COMB ? (comb *)s->combs.at + (k->write & ~COMB) : NULL;
}

/* The number of a comb with these marks; 0: no memory. */
static uint32_t new_comb(shadow *s, uint32_t period, const mark *at, uint32_t n) {
  mark *kept = pm_realloc(NULL, n * sizeof *at);
  const uint32_t k = kept ? take(s, &s->combs, sizeof(comb)) : 0;
  if (!k) {
    s->no_memory = true;
    pm_free(kept);
    return 0;
  }
  memcpy(kept, at, n * sizeof *at);
  ((comb *)s->combs.at)[k] = (comb){.period = period, .n = n, .at = kept};
  s->bytes += n * sizeof *at;
  s->comb_bytes += n * sizeof *at;
  return k;
}

static void mark_history(shadow *s, const mark *k) {
  pm_shadow_at(s, k->write)->marked = true;
  for (uint32_t l = k->since; l && !list_at(s, l)->marked; l = list_at(s, l)->next) {
    list_at(s, l)->marked = true;
    pm_shadow_at(s, list_at(s, l)->event)->marked = true;
  }
}

static void mark_page(shadow *s, const page *p) {
  for (uint32_t k = 0; k < p->n; k++) {
    comb *c = comb_of(s, &p->at[k]);
    if (!c) mark_history(s, &p->at[k]);
    if (!c || c->marked) continue;
    c->marked = true;
    for (uint32_t j = 0; j < c->n; j++) mark_history(s, &c->at[j]);
  }
}

static void sweep_combs(shadow *s) {
  for (uint32_t k = 1; k < s->combs.n; k++) {
    comb *c = (comb *)s->combs.at + k;
    if (c->at && !c->marked) {
      s->bytes -= c->n * sizeof *c->at;
      s->comb_bytes -= c->n * sizeof *c->at;
      pm_free(c->at);
      c->at = NULL;
    }
    if (!c->at) give(&s->combs, k, sizeof *c);
    c->marked = false;
  }
  s->live_comb_bytes = s->comb_bytes;
}

void pm_shadow_sweep(shadow *s) {
  if (s->events.taken < s->events.live + FEW && s->lists.taken < s->lists.live + FEW &&
      s->comb_bytes < 2 * s->live_comb_bytes + FEW_BYTES) {
    return;
  }
  for (uint32_t k = 0; k < s->n_regions; k++) {
    for (size_t j = 0; j < s->regions[k].n_pages; j++) mark_page(s, &s->regions[k].pages[j]);
  }
  memset(s->recent, 0, sizeof s->recent);
  s->combs.free = 0;
  sweep_combs(s);
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
  if (x->event->mem->space == PM_TMEM) return TENSOR;
  return !x->engine ? SEEN : e->touch == READ ? DRAINED : FENCED;
}

static void note(conflict *c, uint32_t event, enum view lacks, size_t from, size_t to) {
  if (c->event == event && c->to == from) c->to = to;
  if (c->event == event && from < c->from) c->from = from, c->to = to;
  if (!c->event) *c = (conflict){event, (uint8_t)lacks, from, to};
}

static bool compare(touching *x, conflict *c, uint32_t number, size_t from, size_t to) {
  const event *e = pm_shadow_at(x->shadow, number);
  const enum view v = needed(x, e);
  if (!is_ordered(x, e, v)) {
    note(c, number, is_ordered(x, e, SEEN) ? v : SEEN, from, to);
    return false;
  }
  if (v != FENCED || is_ordered(x, e, BY_AUTHOR)) return true;
  note(&x->by_author, number, BY_AUTHOR, from, to);
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
  if (!write) return;
  if (x->write.event && x->write.event != write) return;
  if (is_rewrite(x, write)) {
    note_rewrite(x->shadow, write, from, to);
    return;
  }
  if (compare(x, &x->write, write, from, to)) x->fine_write = write;
}

static void compare_since(touching *x, uint32_t list, size_t from, size_t to) {
  bool fine = true;
  if (!list) return;
  for (uint32_t l = list; l; l = list_at(x->shadow, l)->next) {
    const uint32_t number = list_at(x->shadow, l)->event;
    const uint8_t touch = pm_shadow_at(x->shadow, number)->touch;
    if (x->event->touch == touch) continue; /* a write is never in a list */
    fine &= compare(x, &x->since, number, from, to);
  }
  if (fine) x->fine_since = list;
}

/* ---- histories ---------------------------------------------------------------------------- */

/* Whoever is ordered after the new access is ordered after the old one, in every way. */
static bool stands_for(const touching *x, const event *old) {
  if (old->touch == ATOMIC && x->event->touch == READ) return false;
  if (old->id == x->event->id) return true;
  for (enum view v = SEEN; v < VIEWS; v++) {
    if (!is_ordered(x, old, v)) return false;
  }
  return true;
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
  uint32_t to = 0;
  while (n-- > 0) to = new_since(s, kept[n], to);
  return x->grown_to = number_of(x) ? new_since(s, x->number, to) : 0;
}

static inline void record(touching *x, mark *k) {
  if (x->event->touch != WRITE) {
    k->since = grown(x, k->since);
    return;
  }
  k->write = number_of(x);
  k->since = 0;
}

static inline bool is_alike(const mark *a, const mark *b) {
  return a->write == b->write && a->since == b->since;
}

/* ---- pages -------------------------------------------------------------------------------- */

/* So many more places at position k, with copies of what is there. */
static bool insert(shadow *s, page *p, uint32_t k, uint32_t more) {
  if (p->n + more > p->cap) {
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
  memmove(p->at + k + more, p->at + k, (p->n - k) * sizeof *p->at);
  if (more == 2) p->at[k + 1] = p->at[k + 2];
  p->n += more;
  return true;
}

/* The first mark that ends after byte `at`. */
static inline uint32_t mark_at(const page *p, uint32_t at) {
  uint32_t low = 0, high = p->n;
  while (low < high) {
    const uint32_t middle = (low + high) / 2;
    if (p->at[middle].to <= at) low = middle + 1;
    else high = middle;
  }
  return low;
}

/* The mark that begins at byte `at`, after a split where none does; UINT32_MAX: no memory. */
static uint32_t split(shadow *s, page *p, uint32_t at) {
  const uint32_t k = mark_at(p, at);
  if (k == p->n || at == (k ? p->at[k - 1].to : 0)) return k;
  if (!insert(s, p, k, 1)) return UINT32_MAX;
  p->at[k].to = at;
  return k + 1;
}

/* Neighbours between marks `first` and `end` with one history become one mark. */
static void merge(page *p, uint32_t first, uint32_t end) {
  uint32_t out = first;
  for (uint32_t k = first + 1; k < end; k++) {
    if (is_alike(&p->at[k], &p->at[out])) {
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
  if (s->full || (!p->cap && !insert(s, p, 0, 1))) return false;
  p->at[0] = (mark){.to = PAGE};
  p->n = 1;
  return true;
}

/* ---- many pieces -------------------------------------------------------------------------- */

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

static inline void append(shadow *s, marks *out, mark k) {
  mark *last = out->n ? out->at + out->n - 1 : NULL;
  if (last && last->write == k.write && last->since == k.since) {
    last->to = k.to;
  } else if (out->n < out->cap || want_marks(s, &out->at, &out->cap, out->n + 1)) {
    out->at[out->n++] = k;
  }
}

/* A place in marks that repeat. */
typedef struct cursor {
  const mark *at;
  uint32_t n, k, pos;
} cursor;

static inline cursor cursor_at(const mark *at, uint32_t n, uint32_t pos) {
  uint32_t low = 0, high = n - 1;
  while (low < high) {
    const uint32_t middle = (low + high) / 2;
    if (at[middle].to <= pos) low = middle + 1;
    else high = middle;
  }
  return (cursor){at, n, low, pos};
}

static inline uint32_t rest_of(const cursor *c, uint32_t limit) {
  return (uint32_t)pm_min(c->at[c->k].to - c->pos, limit);
}

static inline void advance(cursor *c, uint32_t bytes) {
  c->pos += bytes;
  if (c->pos < c->at[c->k].to || ++c->k < c->n) return;
  c->k = c->pos = 0;
}

/* What the bytes of a mark repeat: its comb, or itself. */
static cursor history_at(const shadow *s, const mark *k, size_t at, mark *one) {
  const comb *c = comb_of(s, k);
  if (c) return cursor_at(c->at, c->n, (uint32_t)(at % c->period));
  *one = (mark){UINT32_MAX, k->write, k->since};
  return (cursor){one, 1, 0, 0};
}

static cursor pattern_at(const shadow *s, size_t at) {
  return cursor_at(s->cuts, s->n_cuts, (uint32_t)(at % s->period));
}

static inline void touch_history(touching *x, mark *k, size_t from, size_t to) {
  if (k->write != x->fine_write) compare_write(x, k->write, from, to);
  if (k->since != x->fine_since) compare_since(x, k->since, from, to);
  record(x, k);
}

/* Bytes of a mark, each piece on its own. */
static void touch_pieces(touching *x, size_t base, const mark *old, uint32_t from, uint32_t to) {
  shadow *s = x->shadow;
  mark one;
  cursor h = history_at(s, old, base + from, &one), w = pattern_at(s, base + from);
  for (uint32_t at = from, bytes; at < to; at += bytes) {
    bytes = rest_of(&h, rest_of(&w, to - at));
    mark piece = h.at[h.k];
    if (w.at[w.k].write) touch_history(x, &piece, base + at, base + at + bytes);
    piece.to = at + bytes;
    append(s, &s->page, piece);
    advance(&h, bytes);
    advance(&w, bytes);
  }
}

static uint32_t common(uint32_t a, uint32_t b) {
  uint32_t x = a, y = b;
  while (y) {
    const uint32_t z = x % y;
    x = y;
    y = z;
  }
  return a / x * b;
}

/* Rewrites are noted place by place. */
static bool rewrites_any(const touching *x, const mark *old, uint32_t period) {
  const shadow *s = x->shadow;
  mark one;
  cursor h = history_at(s, old, 0, &one), w = pattern_at(s, 0);
  if (x->event->touch != WRITE || !x->others) return false;
  for (uint32_t at = 0, bytes; at < period; at += bytes) {
    bytes = rest_of(&h, rest_of(&w, period - at));
    if (w.at[w.k].write && h.at[h.k].write && is_rewrite(x, h.at[h.k].write)) return true;
    advance(&h, bytes);
    advance(&w, bytes);
  }
  return false;
}

/* The marks of a period that begins at a multiple of it in the region, of bytes that go from `from`
 * for a period at least. */
static void touch_period(touching *x, const mark *old, uint32_t period, size_t from) {
  shadow *s = x->shadow;
  mark one;
  cursor h = history_at(s, old, 0, &one), w = pattern_at(s, 0);
  const uint32_t phase = (uint32_t)(from % period);
  s->made.n = 0;
  for (uint32_t at = 0, bytes; at < period; at += bytes) {
    bytes = rest_of(&h, rest_of(&w, period - at));
    mark piece = h.at[h.k];
    const uint32_t skip = at < phase && phase < at + bytes ? phase - at : 0;
    const size_t first = from - phase + at + skip + (at + bytes <= phase ? period : 0);
    if (w.at[w.k].write) touch_history(x, &piece, first, first + bytes - skip);
    piece.to = at + bytes;
    append(s, &s->made, piece);
    advance(&h, bytes);
    advance(&w, bytes);
  }
}

/* What becomes of a mark of bytes that go from `from` for so many, as one mark; false: it has to be
 * done piece by piece. An access finds the same marks in many pages. */
static bool touch_comb(touching *x, mark *k, size_t from, uint32_t bytes) {
  shadow *s = x->shadow;
  const comb *c = comb_of(s, k);
  for (uint32_t j = 0; j < x->n_done; j++) {
    const done *d = &s->done[j];
    if (d->write != k->write || d->since != k->since || bytes < d->period) continue;
    k->write = d->to_write;
    k->since = d->to_since;
    return true;
  }
  const uint32_t period = common(c ? c->period : 1, s->period);
  if (period > MOST_PERIOD || bytes < 2 * period) return false;
  const uint32_t n = (c ? period / c->period * c->n : 1) + period / s->period * s->n_cuts;
  if (n > MOST_COMB || rewrites_any(x, k, period)) return false;
  done d = {.write = k->write, .since = k->since, .period = period};
  touch_period(x, k, period, from);
  if (s->no_memory) return false;
  c = comb_of(s, k);
  if (s->made.n == 1) {
    d.to_write = s->made.at->write;
    d.to_since = s->made.at->since;
  } else if (c && c->period == period && c->n == s->made.n &&
             !memcmp(c->at, s->made.at, c->n * sizeof *c->at)) {
    d.to_write = k->write;
  } else {
    d.to_write = COMB | new_comb(s, period, s->made.at, s->made.n);
  }
  k->write = d.to_write;
  k->since = d.to_since;
  if (x->n_done < MOST_DONE) s->done[x->n_done++] = d;
  return true;
}

/* Bytes of a mark: appends what becomes of them to s->page. */
static void touch_mark(touching *x, size_t base, mark k, uint32_t from, uint32_t to) {
  const bool whole = x->shadow->period == 1 && !(k.write & COMB);
  if (whole) touch_history(x, &k, base + from, base + to);
  if (!whole && !touch_comb(x, &k, base + from, to - from)) {
    touch_pieces(x, base, &k, from, to);
    return;
  }
  k.to = to;
  append(x->shadow, &x->shadow->page, k);
}

/* Runs of bytes of a page in one pass over its marks. */
static void touch_marks(touching *x, page *p, size_t base, const run *r, uint32_t n) {
  shadow *s = x->shadow;
  uint32_t at = 0, i = 0, j = 0;
  s->page.n = 0;
  while (at < PAGE) {
    const mark piece = p->at[i];
    const bool inside = j < n && r[j].from <= at;
    const uint32_t limit = j == n ? PAGE : inside ? r[j].to : r[j].from;
    const uint32_t to = (uint32_t)pm_min(piece.to, limit);
    if (inside) touch_mark(x, base, piece, at, to);
    else append(s, &s->page, (mark){to, piece.write, piece.since});
    if (to == piece.to) i++;
    if (inside && to == r[j].to) j++;
    at = to;
  }
  if (s->no_memory || !want_marks(s, &p->at, &p->cap, s->page.n)) return;
  memcpy(p->at, s->page.at, s->page.n * sizeof *p->at);
  p->n = s->page.n;
}

/* The same for marks first <= k < end, which begin at `from`. */
static void touch_some(touching *x, page *p, size_t base, uint32_t from, uint32_t first,
                       uint32_t end) {
  shadow *s = x->shadow;
  s->page.n = 0;
  for (uint32_t k = first; k < end; k++) {
    touch_mark(x, base, p->at[k], k == first ? from : p->at[k - 1].to, p->at[k].to);
  }
  const uint32_t rest = p->n - end, n = first + s->page.n + rest;
  if (s->no_memory || !want_marks(s, &p->at, &p->cap, n)) return;
  memmove(p->at + first + s->page.n, p->at + end, rest * sizeof *p->at);
  memcpy(p->at + first, s->page.at, s->page.n * sizeof *p->at);
  p->n = n;
  merge(p, first ? first - 1 : 0, (uint32_t)pm_min(first + s->page.n + 1, n));
}

/* Bytes of one mark that has no comb; false: they are not. */
static bool touch_inside(touching *x, page *p, size_t base, uint32_t from, uint32_t to) {
  uint32_t k = mark_at(p, from);
  mark *old = &p->at[k], now = {to, old->write, old->since};
  const bool before = from > (k ? old[-1].to : 0), after = to < old->to;
  if (to > old->to || old->write & COMB) return false;
  touch_history(x, &now, base + from, base + to);
  if (is_alike(old, &now)) return true;
  if (!before && after && k && is_alike(old - 1, &now)) {
    old[-1].to = to;
    return true;
  }
  if (before && !after && k + 1 < p->n && is_alike(old + 1, &now)) {
    old->to = from;
    return true;
  }
  if (before + after && !insert(x->shadow, p, k, before + after)) return true;
  if (before) p->at[k++].to = from;
  p->at[k] = now;
  merge(p, k ? k - 1 : 0, (uint32_t)pm_min(k + 2, p->n));
  return true;
}

/* ---- ways to touch ------------------------------------------------------------------------ */

static void touch_page(touching *x, page *p, size_t base, uint32_t from, uint32_t to) {
  shadow *s = x->shadow;
  bool pieces = s->period > 1;
  if (!begin_page(s, p) || (!pieces && touch_inside(x, p, base, from, to))) return;
  const uint32_t first = split(s, p, from), end = first == UINT32_MAX ? first : split(s, p, to);
  if (end == UINT32_MAX) return;
  for (uint32_t k = first; k < end; k++) pieces |= p->at[k].write >> 31;
  if (pieces) {
    touch_some(x, p, base, from, first, end);
    return;
  }
  for (uint32_t k = first; k < end; k++) {
    const size_t begin = base + (k == first ? from : p->at[k - 1].to);
    touch_history(x, &p->at[k], begin, base + p->at[k].to);
  }
  merge(p, first ? first - 1 : 0, (uint32_t)pm_min(end + 1, p->n));
}

static void touch_range(touching *x, region *g, size_t from, size_t to) {
  for (size_t at = from; at < to;) {
    const size_t number = at / PAGE, base = number * PAGE, end = pm_min((int64_t)to, base + PAGE);
    if (number >= g->n_pages || x->shadow->no_memory) return;
    touch_page(x, &g->pages[number], base, (uint32_t)(at - base), (uint32_t)(end - base));
    at = end;
  }
}

/* All bytes of what is touched. */
static void touch_all(shadow *s) {
  s->period = s->n_cuts = 1;
  s->cuts[0] = (mark){.to = 1, .write = 1};
}

void pm_shadow_touch(touching *x, region *g, size_t from, size_t to) {
  touch_all(x->shadow);
  touch_range(x, g, from, to);
}

void pm_shadow_touch_runs(touching *x, region *g, size_t number, const run *runs, uint32_t n) {
  shadow *s = x->shadow;
  page *p = &g->pages[number];
  touch_all(s);
  if (number >= g->n_pages || s->no_memory || !begin_page(s, p)) return;
  if (n == 1) {
    touch_page(x, p, number * PAGE, runs->from, runs->to);
  } else {
    touch_marks(x, p, number * PAGE, runs, n);
  }
}

void pm_shadow_touch_periods(touching *x, region *g, size_t from, size_t to, uint32_t period,
                             const run *runs, uint32_t n) {
  shadow *s = x->shadow;
  const int64_t phase = (int64_t)(from % period);
  uint32_t at = 0;
  s->period = period;
  s->n_cuts = x->n_done = 0;
  for (int64_t shift = phase - period; shift <= phase; shift += period) {
    for (uint32_t k = 0; k < n; k++) {
      const int64_t a = pm_max(0, runs[k].from + shift), b = pm_min(period, runs[k].to + shift);
      if (a >= b) continue;
      if (a > at) s->cuts[s->n_cuts++] = (mark){.to = (uint32_t)a};
      s->cuts[s->n_cuts++] = (mark){.to = at = (uint32_t)b, .write = 1};
    }
  }
  if (at < period) s->cuts[s->n_cuts++] = (mark){.to = period};
  touch_range(x, g, from, to);
  x->n_done = 0;
}

static void each_event(shadow *s, const mark *k, shadow_visit *visit, void *ctx, size_t from,
                       size_t to) {
  if (k->write) visit(ctx, pm_shadow_at(s, k->write), from, to);
  for (uint32_t l = k->since; l; l = list_at(s, l)->next) {
    visit(ctx, pm_shadow_at(s, list_at(s, l)->event), from, to);
  }
}

void pm_shadow_visit(shadow *s, const region *g, shadow_visit *visit, void *ctx) {
  for (size_t j = 0; j < g->n_pages; j++) {
    size_t from = j * PAGE;
    for (uint32_t k = 0; k < g->pages[j].n; from = j * PAGE + g->pages[j].at[k++].to) {
      const mark *x = &g->pages[j].at[k];
      const comb *c = comb_of(s, x);
      for (uint32_t i = 0; c && i < c->n; i++) {
        each_event(s, &c->at[i], visit, ctx, from, j * PAGE + x->to);
      }
      if (!c) each_event(s, x, visit, ctx, from, j * PAGE + x->to);
    }
  }
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
  for (uint32_t k = 1; k < s->combs.n; k++) pm_free(((comb *)s->combs.at)[k].at);
  pm_free(s->combs.at);
  pm_free(s->made.at);
  pm_free(s->page.at);
}
