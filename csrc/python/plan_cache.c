/* The plans of all kernels. The least recently used are dropped when plans take too much memory.
 *
 * Each kernel finds its plans in a table of its own (signatures.h); all plans are also in one list.
 * A hit stamps the plan with a clock that advances whenever a plan is added, so it costs one store.
 * When a new plan makes the sum of the sizes exceed PALLAS_MGPU_PLAN_BYTES, the plans with the
 * oldest stamps are removed from their tables until a quarter of the limit is free again. A plan
 * that a call is using lives until the call ends.
 *
 * Nothing here calls the driver: modules of removed plans are unloaded later (runtime/modules.c).
 *
 * Locks: `lock` guards the list and is taken before that of a table. Both are held for a few
 * instructions, without running Python or releasing anything. With the GIL, tables need none. */
#include "plan.h"

#include <stdatomic.h>
#include <stddef.h>
#include <stdlib.h>

#include "../base/env.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pmpy_plan *newest; /* the list, by next and previous */
static _Atomic uint64_t now = 1;

#ifdef Py_GIL_DISABLED
#define LOCK_TABLE(t) PyMutex_Lock(&(t)->lock)
#define UNLOCK_TABLE(t) PyMutex_Unlock(&(t)->lock)
#else
#define LOCK_TABLE(t) (void)(t)
#define UNLOCK_TABLE(t) (void)(t)
#endif

static pmpy_plan *plan_of(pmpy_signature *s) {
  return (pmpy_plan *)((char *)s - offsetof(pmpy_plan, signature));
}

pmpy_plan *pmpy_plans_find(pmpy_plans *t, const pmpy_signature *s) {
  pmpy_plan *found = NULL;
  uint32_t probe = (uint32_t)s->hash;
  LOCK_TABLE(t);
  pmpy_signature *e = pmpy_table_find(&t->table, s, &probe);
  if (e) {
    found = (pmpy_plan *)Py_NewRef((PyObject *)plan_of(e));
    atomic_store_explicit(&found->used, atomic_load_explicit(&now, memory_order_relaxed),
                          memory_order_relaxed);
  }
  UNLOCK_TABLE(t);
  return found;
}

/* ---- the list ----------------------------------------------------------------------------- */

static void link_plan(pmpy_plan *p) {
  p->next = newest;
  if (newest) newest->previous = p;
  newest = p;
}

/* Out of the list and its table; its reference is the caller's now. The lock is held. */
static void take_out(pmpy_plan *p) {
  pmpy_plans *t = p->owner;
  LOCK_TABLE(t);
  pmpy_table_remove(&t->table, &p->signature);
  UNLOCK_TABLE(t);
  if (p->previous) p->previous->next = p->next;
  else newest = p->next;
  if (p->next) p->next->previous = p->previous;
  p->next = p->previous = NULL;
  p->owner = NULL;
}

static uint64_t stamp(const pmpy_plan *p) {
  return atomic_load_explicit(&p->used, memory_order_relaxed);
}

static int by_use(const void *a, const void *b) {
  const uint64_t x = stamp(*(pmpy_plan *const *)a), y = stamp(*(pmpy_plan *const *)b);
  return x < y ? -1 : x > y;
}

/* Bytes and number of all plans. The lock is held. */
static size_t measure(size_t *n) {
  size_t bytes = 0;
  *n = 0;
  for (const pmpy_plan *p = newest; p; p = p->next, ++*n)
    bytes += atomic_load_explicit(&p->bytes, memory_order_relaxed);
  return bytes;
}

/* The plans to release: those longest unused, but `not`, until at most `limit` bytes are left. The
 * lock is held; what cannot be done for want of memory is left. */
static pmpy_plan **choose(size_t limit, const pmpy_plan * not, size_t *n_chosen) {
  size_t n, bytes = measure(&n), i = 0;
  *n_chosen = 0;
  if (bytes <= limit || !n) return NULL;
  pmpy_plan **all = PyMem_RawMalloc(n * sizeof *all);
  if (!all) return NULL;
  for (pmpy_plan *p = newest; p; p = p->next) all[i++] = p;
  qsort(all, n, sizeof *all, by_use);
  for (i = 0; i < n && bytes > limit; i++) {
    if (all[i] == not ) continue;
    bytes -= atomic_load_explicit(&all[i]->bytes, memory_order_relaxed);
    take_out(all[i]);
    all[(*n_chosen)++] = all[i];
  }
  return all;
}

static void release(pmpy_plan **chosen, size_t n) {
  for (size_t i = 0; i < n; i++) Py_DECREF((PyObject *)chosen[i]);
  PyMem_RawFree(chosen);
}

int pmpy_plans_add(pmpy_plans *t, pmpy_plan *p) {
  const size_t limit = (size_t)pm_env_number(PM_ENV_PLAN_BYTES);
  size_t n, n_chosen = 0;
  pmpy_plan **chosen = NULL;
  atomic_store(&p->used, atomic_fetch_add(&now, 1) + 1);
  pthread_mutex_lock(&lock);
  LOCK_TABLE(t);
  const bool ok = pmpy_table_add(&t->table, &p->signature);
  UNLOCK_TABLE(t);
  if (ok) {
    p->owner = t;
    link_plan((pmpy_plan *)Py_NewRef((PyObject *)p));
    if (measure(&n) > limit) chosen = choose(limit - limit / 4, p, &n_chosen);
  }
  pthread_mutex_unlock(&lock);
  release(chosen, n_chosen);
  if (!ok) PyErr_NoMemory();
  return ok ? 0 : -1;
}

static pmpy_plan *take_any(pmpy_plans *t) {
  pmpy_plan *p = NULL;
  pthread_mutex_lock(&lock);
  for (uint32_t i = 0; i < t->table.capacity && !p; i++)
    if (t->table.at[i]) p = plan_of(t->table.at[i]);
  if (p) take_out(p);
  pthread_mutex_unlock(&lock);
  return p;
}

void pmpy_plans_clear(pmpy_plans *t) {
  for (pmpy_plan *p; (p = take_any(t));) Py_DECREF((PyObject *)p);
  pmpy_table_free(&t->table);
}

PyObject *pmpy_plans_clear_all(PyObject *module, PyObject *unused) {
  size_t n;
  (void)module, (void)unused;
  pthread_mutex_lock(&lock);
  pmpy_plan **chosen = choose(0, NULL, &n);
  pthread_mutex_unlock(&lock);
  release(chosen, n);
  Py_RETURN_NONE;
}

PyObject *pmpy_plans_size(PyObject *module, PyObject *unused) {
  size_t n;
  (void)module, (void)unused;
  pthread_mutex_lock(&lock);
  const size_t bytes = measure(&n);
  pthread_mutex_unlock(&lock);
  return Py_BuildValue("{s:n,s:n}", "plans", (Py_ssize_t)n, "bytes", (Py_ssize_t)bytes);
}
