/* Signatures of calls, and hash tables that find what was made for them: the plans of a kernel, the
 * entries of a family.
 *
 * A signature is a row of 64-bit words that says all that matters about the arrays of a call. It is
 * hashed, and compared in full. A table holds things that begin with a signature, or contain one at
 * a fixed place; it neither owns nor locks them. Open addressing with linear probing: a power of
 * two, at most half full. */
#ifndef PMPY_SIGNATURES_H
#define PMPY_SIGNATURES_H

#include "exchange.h"

typedef struct pmpy_signature {
  uint64_t hash;
  uint32_t n;
  int64_t *word;
} pmpy_signature;

/* One that is being built; few words need no memory. */
typedef struct pmpy_new_signature {
  pmpy_signature is;
  int64_t few[64], *many;
} pmpy_new_signature;

/* Room for that many words; NULL with MemoryError. pmpy_signature_drop in either case. */
int64_t *pmpy_signature_begin(pmpy_new_signature *s, size_t most);
/* The words of an array: dtype, rank and flags in one, then the extents, and the strides if it is
 * not contiguous. What follows them. */
static inline int64_t *pmpy_sign(int64_t *at, const pmpy_buffer *b, bool flag) {
  *at++ = b->dtype | b->rank << 8 | b->strided << 16 | flag << 17;
  for (int d = 0; d < b->rank; d++) *at++ = b->shape[d];
  for (int d = 0; b->strided && d < b->rank; d++) *at++ = b->stride[d];
  return at;
}
/* At most that many words for n arrays. */
static inline size_t pmpy_sign_most(size_t n) { return n * (2 * PM_MAX_RANK + 1); }
/* All words are there, up to `end`: hash them. */
static inline void pmpy_signature_end(pmpy_new_signature *s, const int64_t *end) {
  s->is.n = (uint32_t)(end - s->is.word);
  s->is.hash = pm_hash(s->is.word, s->is.n * sizeof *s->is.word, 0);
}
void pmpy_signature_drop(pmpy_new_signature *s);
/* To keep, until pmpy_signature_free; 0, or -1 with MemoryError. */
int pmpy_signature_copy(pmpy_signature *to, const pmpy_signature *from);
void pmpy_signature_free(pmpy_signature *s);

typedef struct pmpy_table {
  pmpy_signature **at;
  uint32_t n, capacity;
} pmpy_table;

/* The first entry with that signature from probe *i on, which begins as the hash; *i is after it
 * then. NULL: there is none. */
static inline pmpy_signature *pmpy_table_find(const pmpy_table *t, const pmpy_signature *s,
                                              uint32_t *i) {
  while (t->capacity) {
    pmpy_signature *e = t->at[(*i)++ & (t->capacity - 1)];
    if (!e) return NULL;
    if (e->hash == s->hash && e->n == s->n && !memcmp(e->word, s->word, s->n * sizeof *s->word))
      return e;
  }
  return NULL;
}
/* False: out of memory, and nothing has changed. */
bool pmpy_table_add(pmpy_table *t, pmpy_signature *e);
/* An entry that is in it. */
void pmpy_table_remove(pmpy_table *t, const pmpy_signature *e);
/* The memory of the table alone. */
void pmpy_table_free(pmpy_table *t);

#endif
