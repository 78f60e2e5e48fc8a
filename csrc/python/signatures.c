/* See signatures.h. Memory is the raw allocator's: tables change with and without the GIL. */
#include "signatures.h"

int64_t *pmpy_signature_begin(pmpy_new_signature *s, size_t most) {
  s->many = NULL;
  s->is.word = s->few;
  if (most <= PM_COUNT(s->few)) return s->few;
  s->is.word = s->many = PyMem_RawMalloc(most * sizeof *s->many);
  if (!s->many) PyErr_NoMemory();
  return s->many;
}

void pmpy_signature_drop(pmpy_new_signature *s) { PyMem_RawFree(s->many); }

int pmpy_signature_copy(pmpy_signature *to, const pmpy_signature *from) {
  *to = *from;
  to->word = PyMem_RawMalloc((from->n + 1) * sizeof *to->word);
  if (!to->word) return PyErr_NoMemory(), -1;
  memcpy(to->word, from->word, from->n * sizeof *to->word);
  return 0;
}

void pmpy_signature_free(pmpy_signature *s) {
  PyMem_RawFree(s->word);
  s->word = NULL;
}

static void place(pmpy_signature **table, uint32_t capacity, pmpy_signature *e) {
  uint32_t i = (uint32_t)e->hash;
  while (table[i & (capacity - 1)]) i++;
  table[i & (capacity - 1)] = e;
}

bool pmpy_table_add(pmpy_table *t, pmpy_signature *e) {
  if ((t->n + 1) * 2 > t->capacity) {
    const uint32_t capacity = t->capacity ? t->capacity * 2 : 8;
    pmpy_signature **at = PyMem_RawCalloc(capacity, sizeof *at);
    if (!at) return false;
    for (uint32_t i = 0; i < t->capacity; i++)
      if (t->at[i]) place(at, capacity, t->at[i]);
    PyMem_RawFree(t->at);
    t->at = at;
    t->capacity = capacity;
  }
  place(t->at, t->capacity, e);
  t->n++;
  return true;
}

/* The entries after it that stand together move up, so that every one is still found. */
void pmpy_table_remove(pmpy_table *t, const pmpy_signature *e) {
  const uint32_t mask = t->capacity - 1;
  uint32_t i = (uint32_t)e->hash;
  while (t->at[i & mask] != e) i++;
  t->at[i++ & mask] = NULL;
  t->n--;
  for (pmpy_signature *other; (other = t->at[i & mask]); i++) {
    t->at[i & mask] = NULL;
    place(t->at, t->capacity, other);
  }
}

void pmpy_table_free(pmpy_table *t) {
  PyMem_RawFree(t->at);
  *t = (pmpy_table){0};
}
