/* Masked loads, stores and atomics, element by element.
 *
 * An element whose mask is false is neither accessed nor resolved, so it may be out of bounds. An
 * element whose mask is true must be within the view and within everything that the view was sliced
 * from. Other agents see all of an instruction or nothing of it. */
#include <inttypes.h>

#include "races.h"

/* An instruction's elements in order. */
typedef struct walker {
  const instr *i;
  const located *s;
  int64_t k, index[PM_MAX_RANK];
} walker;

static bool next(walker *w) {
  const access *mem = w->s->mem;
  const indexing *by = mem->by;
  const int64_t *dim = by ? by->dim : mem->dim;
  for (uint32_t d = by ? by->rank : mem->rank; d-- > 0;) {
    if (++w->index[d] < dim[d]) break;
    w->index[d] = 0;
  }
  return ++w->k < (by ? by->size : mem->n);
}

/* Where array indices put the element in the view; the dimension that has none such, -1: all do. */
static int indexed(thread *t, const walker *w, int64_t *out) {
  const access *mem = w->s->mem;
  int outside = -1;
  for (int d = mem->rank - 1; d >= 0; d--) {
    const int from = mem->by->from[d];
    out[d] = w->index[from < 0 ? 0 : from];
    if (from < 0) out[d] = ((const int32_t *)slot_of(t, mem->by->slot[-1 - from]))[w->k];
    if (out[d] < 0 || out[d] >= mem->dim[d]) outside = d;
  }
  return outside;
}

/* Of the operand in `slot`, the n-th after the ref. */
static char *operand(thread *t, const walker *w, uint32_t slot, uint32_t n, size_t bytes) {
  return (char *)slot_of(t, slot) + (w->i->to >> n & 1 ? 0 : (size_t)w->k * bytes);
}

static inline char *place_of(thread *t, const walker *w) {
  const access *mem = w->s->mem;
  int64_t at[PM_MAX_RANK];
  if (mem->by) return indexed(t, w, at) < 0 ? pm_vm_element(w->s, true, at) : NULL;
  if (w->s->inside && mem->contiguous) return w->s->at + w->k * mem->bytes;
  return pm_vm_element(w->s, true, w->index);
}

static step outside(pm_machine *m, thread *t, const walker *w, const char *what) {
  const access *mem = w->s->mem;
  int64_t at[PM_MAX_RANK];
  const int d = w->s->base && mem->by ? indexed(t, w, at) : -1;
  char owner[128];
  if (d < 0) return pm_vm_outside(m, t, w->i->op, w->s, what);
  return pm_vm_fail(m, t, w->i->op, PM_E_INDEX,
                    "%s out of bounds: index %" PRId64
                    " of an array of indices, for dimension %d "
                    "of %s'%s'%s, which has size %" PRId64,
                    what, at[d], d, mem->n_steps ? "a view of " : "", mem->name,
                    pm_vm_whose(m, t, mem, owner, sizeof owner), mem->dim[d]);
}

static bool is_true(thread *t, const walker *w, uint32_t slot, uint32_t n) {
  return *operand(t, w, slot, n, 1) != 0;
}

/* Elements of a row of bytes. */
static void race_row(tracker *x, thread *t, const instr *i, const located *s, uint32_t slot,
                     uint32_t n) {
  const char *on = slot_of(t, slot);
  const int64_t size = i->mem->n, bytes = i->mem->bytes;
  if (i->to >> n & 1) {
    if (*on) pm_race_element(x, s->at, (size_t)(size * bytes));
    return;
  }
  for (int64_t k = 0, from; k < size;) {
    while (k < size && !on[k]) k++;
    from = k;
    while (k < size && on[k]) k++;
    if (k > from) pm_race_element(x, s->at + from * bytes, (size_t)((k - from) * bytes));
  }
}

/* What the instruction is about to touch; the mask is in `slot`, the n-th operand after the ref.
 */
static step race(pm_machine *m, thread *t, const instr *i, const located *s, touch touch,
                 uint32_t slot, uint32_t n) {
  const access *mem = i->mem;
  walker w = {.i = i, .s = s};
  uint32_t count = 0;
  bool rising = true;
  tracker x;
  if (!s->base || !pm_race_begin_elements(&x, m, t, i, s, touch)) return STEP_NEXT;
  if (!mem->by && s->inside && mem->contiguous) {
    race_row(&x, t, i, s, slot, n);
    return pm_race_end_elements(&x);
  }
  const char **places = pm_race_places(m, mem->by ? mem->by->size : mem->n);
  if (!places) return pm_race_end_elements(&x);
  do {
    const char *at = is_true(t, &w, slot, n) ? place_of(t, &w) : NULL;
    if (!at) continue;
    rising &= !count || at > places[count - 1];
    places[count++] = at;
  } while (next(&w));
  return pm_race_end_places(&x, count, rising);
}

/* Of the usual sizes without a call. */
static void copy_element(char *to, const char *from, size_t bytes) {
  switch (bytes) {
    case 1: *to = *from; break;
    case 2: memcpy(to, from, 2); break;
    case 4: memcpy(to, from, 4); break;
    default: memcpy(to, from, bytes);
  }
}

static step exec_masked_load(pm_machine *m, thread *t, const instr *i) {
  located s;
  pm_vm_locate(m, t, i->mem, &s);
  walker w = {.i = i, .s = &s};
  const size_t bytes = i->mem->bytes;
  char *to = slot_of(t, i->dst);
  if (m->races && race(m, t, i, &s, READ, i->a, 0) == STEP_FAIL) return STEP_FAIL;
  do {
    char *x = to + (size_t)w.k * bytes;
    if (!is_true(t, &w, i->a, 0)) {
      copy_element(x, operand(t, &w, i->b, 1, bytes), bytes);
      continue;
    }
    const char *at = s.base ? place_of(t, &w) : NULL;
    if (!at && (m->options.oob_raise || !s.base))
      return outside(m, t, &w, i->mem->by ? "load" : "masked load");
    if (at) {
      copy_element(x, at, bytes);
    } else {
      pm_interp_fill(i->mem->dtype, m->options.zero_fill, x, 1);
    }
  } while (next(&w));
  return STEP_PAUSE;
}

static step exec_masked_store(pm_machine *m, thread *t, const instr *i) {
  located s;
  pm_vm_locate(m, t, i->mem, &s);
  walker w = {.i = i, .s = &s};
  const size_t bytes = i->mem->bytes;
  if (m->races && race(m, t, i, &s, WRITE, i->b, 1) == STEP_FAIL) return STEP_FAIL;
  do {
    if (!is_true(t, &w, i->b, 1)) continue;
    char *at = s.base ? place_of(t, &w) : NULL;
    if (!at) return outside(m, t, &w, i->mem->by ? "store" : "masked store");
    copy_element(at, operand(t, &w, i->a, 0, bytes), bytes);
  } while (next(&w));
  return m->races && pm_race_stored(m) == STEP_FAIL ? STEP_FAIL : STEP_PAUSE;
}

static int64_t combined_int(int64_t kind, int64_t x, int64_t y) {
  switch (kind) {
    case PM_ATOMIC_ADD: return x + y;
    case PM_ATOMIC_MAX: return pm_max(x, y);
    case PM_ATOMIC_MIN: return pm_min(x, y);
    case PM_ATOMIC_AND: return x & y;
    case PM_ATOMIC_OR: return x | y;
    default: return x ^ y;
  }
}

/* NaN wins, -0 is less than 0 */
static double combined_float(int64_t kind, double x, double y) {
  if (kind == PM_ATOMIC_ADD) return x + y;
  if (x != x || y != y) return x != x ? x : y;
  const bool less = x < y || (x == y && __builtin_signbit(x));
  return (kind == PM_ATOMIC_MIN) == less ? x : y;
}

void pm_vm_combine(pm_dtype d, int64_t kind, char *at, const char *value, const char *compare) {
  const size_t bytes = pm_dtypes[d].bytes;
  pm_scalar x = pm_load_scalar(d, at), y = pm_load_scalar(d, value);
  if (kind == PM_ATOMIC_CAS && memcmp(at, compare, bytes)) return;
  if (kind >= PM_ATOMIC_XCHG) {
    memcpy(at, value, bytes);
    return;
  }
  if (pm_is_float(d)) {
    x.f = combined_float(kind, x.f, y.f);
  } else {
    x.i = combined_int(kind, x.i, y.i);
  }
  pm_store_scalar(d, at, x);
}

static step exec_atomic(pm_machine *m, thread *t, const instr *i) {
  located s;
  pm_vm_locate(m, t, i->mem, &s);
  walker w = {.i = i, .s = &s};
  const size_t bytes = i->mem->bytes;
  char *old = slot_of(t, i->dst);
  if (m->races && race(m, t, i, &s, ATOMIC, i->b, 1) == STEP_FAIL) return STEP_FAIL;
  do {
    char *x = old + (size_t)w.k * bytes;
    memset(x, 0, bytes);
    if (!is_true(t, &w, i->b, 1)) continue;
    char *at = s.base ? place_of(t, &w) : NULL;
    if (!at) return outside(m, t, &w, "atomic");
    memcpy(x, at, bytes);
    const char *compare = i->flags == PM_ATOMIC_CAS ? operand(t, &w, i->c, 2, bytes) : NULL;
    pm_vm_combine(i->mem->dtype, i->flags, at, operand(t, &w, i->a, 0, bytes), compare);
  } while (next(&w));
  return STEP_PAUSE;
}

/* ---- what was never written --------------------------------------------------------------- */

/* Byte of the frame where the walker's element of an operand is. */
static uint32_t frame_byte(thread *t, const walker *w, uint32_t slot, uint32_t n) {
  return (uint32_t)(operand(t, w, slot, n, w->i->mem->bytes) - t->frame);
}

static step check_element(pm_machine *m, thread *t, const walker *w, uint32_t mask, uint32_t n) {
  const indexing *by = w->i->mem->by;
  const uint32_t element = w->i->to >> n & 1 ? 0 : (uint32_t)w->k;
  if (pm_poison_mask(m, t, w->i, mask, element) == STEP_FAIL) return STEP_FAIL;
  if (!is_true(t, w, mask, n)) return STEP_NEXT;
  for (uint32_t k = 0; by && k < by->n; k++) {
    if (pm_poison_index(m, t, w->i, by->slot[k], w->k) == STEP_FAIL) return STEP_FAIL;
  }
  return STEP_NEXT;
}

static step poison_rule(pm_machine *m, thread *t, const instr *i) {
  if (pm_poison_rule_addresses(m, t, i) == STEP_FAIL) return STEP_FAIL;
  const bool load = i->exec == exec_masked_load, store = i->exec == exec_masked_store;
  const uint32_t mask = load ? i->a : i->b, n = load ? 0 : 1;
  const size_t bytes = i->mem->bytes;
  located s;
  pm_vm_locate(m, t, i->mem, &s);
  walker w = {.i = i, .s = &s};
  do {
    const uint32_t dst = i->dst + (uint32_t)((size_t)w.k * bytes);
    if (check_element(m, t, &w, mask, n) == STEP_FAIL) return STEP_FAIL;
    const bool on = is_true(t, &w, mask, n);
    const char *at = on && s.base ? place_of(t, &w) : NULL;
    if (at) {
      pm_poison_element(m, t, i, &s, at, load ? 0 : frame_byte(t, &w, i->a, 0), store ? 0 : dst);
    } else if (load) {
      memset(t->poison + dst, on ? PM_POISON_OUTSIDE : t->poison[frame_byte(t, &w, i->b, 1)],
             bytes);
    } else if (!store) {
      memset(t->poison + dst, 0, bytes);
    }
  } while (next(&w));
  return STEP_NEXT;
}

const handler pm_vm_MASKED_LOAD = {pm_vm_encode_masked, exec_masked_load, {.poison = poison_rule}};
const handler pm_vm_MASKED_STORE = {
    pm_vm_encode_masked_store, exec_masked_store, {.poison = poison_rule}};
const handler pm_vm_ATOMIC = {pm_vm_encode_masked_store, exec_atomic, {.poison = poison_rule}};
