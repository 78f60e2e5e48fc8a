/* Memory: resolving accesses, walking strided views.
 *
 * Everything is row-major in logical dimensions: tilings and swizzles do not exist here. A view
 * that is pm_vm_within the refs that it was sliced from is a base address and a few loops; dynamic
 * starts are checked before every access. A view that overhangs is walked element by element
 * through the steps that created it. */
#include <inttypes.h>
#include <stdio.h>

#include "vm.h"

void pm_interp_fill(pm_dtype d, bool zeros, void *p, int64_t n) {
  uint32_t v = zeros ? 0 : pm_unwritten(d);
  uint8_t bytes = pm_dtypes[d].bytes;
  if (bytes == 1 || v == 0 || v == ~0u) {
    memset(p, (int)(v & 0xff), (size_t)n * bytes);
  } else if (bytes == 2) {
    for (int64_t k = 0; k < n; k++) ((uint16_t *)p)[k] = (uint16_t)v;
  } else {
    for (int64_t k = 0; k < n; k++) ((uint32_t *)p)[k] = v;
  }
}

/* ---- where an access is ------------------------------------------------------------------- */

/* The block with another coordinate on one axis; NULL: there is none. */
static const block *peer(const pm_machine *m, const block *b, uint32_t dim, int64_t coord) {
  int64_t stride = 1;
  if (coord < 0 || coord >= m->cluster[dim]) return NULL;
  for (uint32_t d = dim + 1; d < m->n_cluster; d++) stride *= m->cluster[d];
  return b + (coord - b->coord[dim]) * stride;
}

int64_t pm_vm_device_of(const pm_machine *m, const thread *t, const access *mem) {
  if (!mem->device_slot) return t->block->cluster->device;
  const int64_t device = *(const int32_t *)(t->frame + mem->device_slot);
  return device >= 0 && device < (int64_t)m->n_devices ? device : -1;
}

static char *base_of(pm_machine *m, thread *t, const access *mem) {
  if (mem->kind == PM_BARRIER || mem->kind == PM_SEMAPHORE || mem->space == PM_TMEM) return NULL;
  if (mem->kind == PM_ARRAY || mem->space == PM_ACC) return slot_of(t, mem->base);
  if (mem->space == PM_GMEM) {
    const int64_t device = pm_vm_device_of(m, t, mem);
    return device < 0 ? NULL : m->buffers[device * m->n_args + mem->base];
  }
  const block *b = t->block;
  if (mem->cluster_slot) b = peer(m, b, mem->cluster_dim, slot_i32(t, mem->cluster_slot));
  const uint32_t number = (t->of ? t->of : t)->index;
  return b ? b->smem + mem->base + (size_t)mem->apart * number : NULL;
}

static bool passes(const start_check *c, const int32_t *starts) {
  int64_t start = c->dynamic ? starts[c->start] : c->start;
  return start >= 0 && start <= c->limit;
}

void pm_vm_locate(pm_machine *m, thread *t, const access *mem, located *s) {
  s->mem = mem;
  s->base = base_of(m, t, mem);
  s->at = NULL;
  s->offset = mem->offset;
  s->inside = s->base || !mem->cluster_slot;
  if (mem->device_slot && pm_vm_device_of(m, t, mem) < 0) s->inside = false;
  for (uint32_t k = 0; k < mem->n_starts; k++) s->starts[k] = slot_i32(t, mem->starts[k]);
  for (uint32_t k = 0; k < mem->n_checks; k++) s->inside &= passes(&mem->checks[k], s->starts);
  if (!s->inside) return;
  for (uint32_t k = 0; k < mem->n_terms; k++) {
    const struct access_term *x = &mem->terms[k];
    s->offset += slot_i32(t, x->slot) / x->div * x->mul;
  }
  if (s->base) s->at = s->base + s->offset * mem->bytes;
}

uint32_t pm_vm_owner(const pm_machine *m, const access *mem, const char *base) {
  uint32_t d = 0;
  while (d + 1 < m->n_devices && m->buffers[d * m->n_args + mem->base] != base) d++;
  return d;
}

located pm_vm_on_device(const pm_machine *m, const located *s, uint32_t to) {
  located out = *s;
  out.base = m->buffers[to * m->n_args + s->mem->base];
  if (s->at) out.at = out.base + (s->at - s->base);
  return out;
}

const char *pm_vm_whose(const pm_machine *m, const thread *t, const access *mem, char *buf,
                        size_t n) {
  buf[0] = 0;
  if (mem->all_devices) snprintf(buf, n, " on all devices");
  if (!mem->device_slot) return buf;
  const int at = snprintf(buf, n, " on device ");
  pm_vm_put_device(m, pm_vm_device_of(m, t, mem), buf + at, n - (size_t)at);
  return buf;
}

step pm_vm_outside(pm_machine *m, thread *t, pm_opid op, const located *s, const char *what) {
  const access *mem = s->mem;
  const start_check *c = mem->checks;
  if (!s->base && mem->cluster_slot) {
    return pm_vm_fail(m, t, op, PM_E_INDEX,
                      "%s out of bounds: cluster_ref of '%s' to index %d of a cluster axis of size "
                      "%" PRId64,
                      what, mem->name, slot_i32(t, mem->cluster_slot),
                      m->cluster[mem->cluster_dim]);
  }
  if (!s->base && mem->device_slot && pm_vm_device_of(m, t, mem) < 0) {
    return pm_vm_fail(m, t, op, PM_E_INDEX,
                      "%s out of bounds: remote_ref of '%s' to device %d of a mesh of %u devices",
                      what, mem->name, slot_i32(t, mem->device_slot), m->n_devices);
  }
  while (passes(c, s->starts)) c++;
  const view_step *v = &mem->steps[c->step];
  int64_t start = c->dynamic ? s->starts[c->start] : c->start, size = v->in_dim[c->dim] - c->limit;
  char shape[256], range[64], device[128];
  int at = 0;
  for (uint32_t d = 0; d < v->in_rank; d++) {
    at += snprintf(shape + at, sizeof shape - (size_t)at, d ? ", %" PRId64 : "%" PRId64,
                   v->in_dim[d]);
  }
  if (v->dropped[c->dim]) {
    snprintf(range, sizeof range, "index %" PRId64, start);
  } else {
    snprintf(range, sizeof range, "range %" PRId64 ":%" PRId64, start, start + size);
  }
  return pm_vm_fail(m, t, op, PM_E_INDEX,
                    "%s out of bounds: %s of dimension %u lies outside %s'%s' of "
                    "shape (%s%s)%s",
                    what, range, c->dim, c->step + 1 < (int)mem->n_steps ? "a view of " : "",
                    mem->name, shape, v->in_rank == 1 ? "," : "",
                    pm_vm_whose(m, t, mem, device, sizeof device));
}

/* ---- inside ------------------------------------------------------------------------------- */

/* One row of n elements from stride `from` to stride `to`, in elements. */
#define COPY_ROW(T)                                                                              \
  static void copy_row_##T(char *dst, int64_t to, const char *src, int64_t from, int64_t n) {    \
    for (int64_t k = 0; k < n; k++) {                                                            \
      memcpy(dst + k * to * (int64_t)sizeof(T), src + k * from * (int64_t)sizeof(T), sizeof(T)); \
    }                                                                                            \
  }
COPY_ROW(uint8_t)
COPY_ROW(uint16_t)
COPY_ROW(uint32_t)

static void copy_row(uint8_t bytes, char *dst, int64_t to, const char *src, int64_t from,
                     int64_t n) {
  if (to == 1 && from == 1) {
    memcpy(dst, src, (size_t)n * bytes);
  } else if (bytes == 1) {
    copy_row_uint8_t(dst, to, src, from, n);
  } else if (bytes == 2) {
    copy_row_uint16_t(dst, to, src, from, n);
  } else {
    copy_row_uint32_t(dst, to, src, from, n);
  }
}

/* The view's rows in order, as far as they are elements from <= k < to; `flat` is the contiguous
 * array of all. */
static void walk(const located *s, int64_t from, int64_t to, char *flat, bool gather) {
  const access *mem = s->mem;
  uint32_t last = mem->n_loops - 1u;
  int64_t n = mem->loop_size[last], stride = mem->loop_stride[last], count[MAX_LOOPS] = {0};
  char *at = s->at;
  for (int64_t row = 0;; row += n) {
    int64_t first = pm_max(from, row), some = pm_min(to, row + n) - first;
    char *x = flat + first * mem->bytes, *y = at + (first - row) * stride * mem->bytes;
    if (some > 0 && gather) copy_row(mem->bytes, x, 1, y, stride, some);
    if (some > 0 && !gather) copy_row(mem->bytes, y, stride, x, 1, some);
    uint32_t d = last;
    for (; d-- > 0;) {
      at += mem->loop_stride[d] * mem->bytes;
      if (++count[d] < mem->loop_size[d]) break;
      at -= mem->loop_stride[d] * mem->loop_size[d] * mem->bytes;
      count[d] = 0;
    }
    if (d == UINT32_MAX) return;
  }
}

void pm_vm_gather(const located *s, void *dst) {
  if (s->mem->contiguous) {
    memcpy(dst, s->at, (size_t)s->mem->n * s->mem->bytes);
  } else {
    walk(s, 0, s->mem->n, dst, true);
  }
}

void pm_vm_scatter(const located *s, const void *src) {
  if (s->mem->contiguous) {
    memcpy(s->at, src, (size_t)s->mem->n * s->mem->bytes);
  } else {
    walk(s, 0, s->mem->n, (char *)src, false);
  }
}

void pm_vm_gather_part(const located *s, int64_t from, int64_t to, void *dst) {
  walk(s, from, to, dst, true);
}

void pm_vm_scatter_part(const located *s, int64_t from, int64_t to, const void *src) {
  walk(s, from, to, (char *)src, false);
}

/* ---- runs --------------------------------------------------------------------------------- */

void pm_vm_begin_runs(const located *s, runs *r) {
  const access *mem = s->mem;
  const int64_t bytes = mem->bytes;
  r->n = 0;
  r->at = s->at;
  r->bytes = mem->bytes;
  for (uint32_t k = 0; k < mem->n_loops; k++) {
    if (mem->loop_size[k] == 1) continue;
    uint32_t at = r->n++;
    for (; at > 0 && r->step[at - 1] < mem->loop_stride[k] * bytes; at--) {
      r->size[at] = r->size[at - 1];
      r->step[at] = r->step[at - 1];
    }
    r->size[at] = mem->loop_size[k];
    r->step[at] = mem->loop_stride[k] * bytes;
  }
  while (r->n && r->step[r->n - 1] == (int64_t)r->bytes) r->bytes *= (size_t)r->size[--r->n];
  memset(r->count, 0, sizeof r->count);
}

bool pm_vm_next_run(runs *r) {
  for (uint32_t d = r->n; d-- > 0;) {
    r->at += r->step[d];
    if (++r->count[d] < r->size[d]) return true;
    r->at -= r->step[d] * r->size[d];
    r->count[d] = 0;
  }
  return false;
}

bool pm_vm_overlap(const located *a, const located *b) {
  runs x, y;
  pm_vm_begin_runs(a, &x);
  pm_vm_begin_runs(b, &y);
  for (;;) {
    if (x.at < y.at + y.bytes && y.at < x.at + x.bytes) return true;
    if (!pm_vm_next_run(x.at < y.at ? &x : &y)) return false;
  }
}

/* ---- overhanging -------------------------------------------------------------------------- */

bool pm_vm_within(const int64_t *index, const int64_t *dim, uint32_t rank) {
  bool ok = true;
  for (uint32_t d = 0; d < rank; d++) ok &= index[d] >= 0 && index[d] < dim[d];
  return ok;
}

char *pm_vm_element(const located *s, bool strict, const int64_t *view_index) {
  const access *mem = s->mem;
  int64_t index[PM_MAX_RANK], in[PM_MAX_RANK], offset = 0;
  memcpy(index, view_index, sizeof index);
  for (uint32_t k = 0; k < mem->n_steps; k++) {
    const view_step *v = &mem->steps[k];
    if (!v->back(v, s->starts, strict, index, in)) return NULL;
    memcpy(index, in, v->in_rank * sizeof *in);
  }
  if (!pm_vm_within(index, mem->base_dim, mem->base_rank)) return NULL;
  for (uint32_t d = 0; d < mem->base_rank; d++) offset = offset * mem->base_dim[d] + index[d];
  return s->base + offset * mem->bytes;
}

static void walk_inside(const located *s, bool strict, char *flat, bool gather) {
  const access *mem = s->mem;
  int64_t index[PM_MAX_RANK] = {0};
  for (int64_t k = 0; k < mem->n; k++, flat += mem->bytes) {
    char *at = pm_vm_element(s, strict, index);
    if (at) memcpy(gather ? flat : at, gather ? at : flat, mem->bytes);
    for (uint32_t d = mem->rank; d-- > 0;) {
      if (++index[d] < mem->dim[d]) break;
      index[d] = 0;
    }
  }
}

void pm_vm_clear_inside(const located *s, bool strict, void *dst) {
  const access *mem = s->mem;
  int64_t index[PM_MAX_RANK] = {0};
  char *flat = dst;
  for (int64_t k = 0; k < mem->n; k++, flat += mem->bytes) {
    if (pm_vm_element(s, strict, index)) memset(flat, 0, mem->bytes);
    for (uint32_t d = mem->rank; d-- > 0;) {
      if (++index[d] < mem->dim[d]) break;
      index[d] = 0;
    }
  }
}

void pm_vm_gather_inside(const located *s, bool strict, void *dst) {
  walk_inside(s, strict, dst, true);
}

void pm_vm_scatter_inside(const located *s, const void *src) {
  walk_inside(s, false, (char *)src, false);
}
