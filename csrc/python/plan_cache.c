/* The plans of all kernels. The least recently used are dropped when plans take too much memory.
 *
 * Each kernel finds its plans in a hash table of its own; all plans are also in one list. A hit
 * stamps the plan with a clock that advances whenever a plan is added, so it costs one store. When
 * a new plan makes the sum of the sizes exceed PALLAS_MGPU_PLAN_BYTES, the plans with the oldest
 * stamps are removed from their tables until a quarter of the limit is free again. A plan that a
 * call is using lives until the call ends.
 *
 * Nothing here calls the driver: modules of removed plans are unloaded later (runtime/modules.c).
 *
 * Locks: `lock` guards the list and is taken before that of a table. Both are held for a few
 * instructions, without running Python or releasing anything. With the GIL, tables need none. */
#include "plan.h"

#include <stdatomic.h>
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

/* ---- one table ---------------------------------------------------------------------------- */

pmpy_plan *pmpy_plans_find(pmpy_plans *t, uint64_t hash, const int64_t *key, uint32_t n) {
  pmpy_plan *found = NULL;
  LOCK_TABLE(t);
  for (uint32_t i = (uint32_t)hash; t->capacity; i++) {
    pmpy_plan *p = t->table[i & (t->capacity - 1)];
    if (!p) break;
    if (p->hash == hash && p->n_key == n && !memcmp(p->key, key, n * sizeof *key)) {
      atomic_store_explicit(&p->used, atomic_load_explicit(&now, memory_order_relaxed),
                            memory_order_relaxed);
      found = (pmpy_plan *)Py_NewRef((PyObject *)p);
      break;
    }
  }
  UNLOCK_TABLE(t);
  return found;
}

static void place(pmpy_plan **table, uint32_t capacity, pmpy_plan *p) {
  uint32_t i = (uint32_t)p->hash;
  while (table[i & (capacity - 1)]) i++;
  table[i & (capacity - 1)] = p;
}

static bool insert(pmpy_plans *t, pmpy_plan *p) {
  if ((t->n + 1) * 2 > t->capacity) {
    const uint32_t capacity = t->capacity ? t->capacity * 2 : 8;
    pmpy_plan **table = PyMem_RawCalloc(capacity, sizeof *table);
    if (!table) return false;
    for (uint32_t i = 0; i < t->capacity; i++)
      if (t->table[i]) place(table, capacity, t->table[i]);
    PyMem_RawFree(t->table);
    t->table = table;
    t->capacity = capacity;
  }
  place(t->table, t->capacity, p);
  t->n++;
  return true;
}

/* The entries behind it that stand together move up, so that every one is still found. */
static void remove_from_table(pmpy_plans *t, const pmpy_plan *p) {
  const uint32_t mask = t->capacity - 1;
  uint32_t i = (uint32_t)p->hash;
  while (t->table[i & mask] != p) i++;
  t->table[i++ & mask] = NULL;
  t->n--;
  for (pmpy_plan *other; (other = t->table[i & mask]); i++) {
    t->table[i & mask] = NULL;
    place(t->table, t->capacity, other);
  }
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
  remove_from_table(t, p);
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
  const bool ok = insert(t, p);
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
  for (uint32_t i = 0; i < t->capacity && !p; i++) p = t->table[i];
  if (p) take_out(p);
  pthread_mutex_unlock(&lock);
  return p;
}

void pmpy_plans_clear(pmpy_plans *t) {
  for (pmpy_plan *p; (p = take_any(t));) Py_DECREF((PyObject *)p);
  PyMem_RawFree(t->table);
  t->table = NULL;
  t->capacity = 0;
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
