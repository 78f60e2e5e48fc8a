/* Arena, growing arrays and the text builder.
 *
 * An arena is a list of chunks, newest first. Memory is allocated from the newest chunk, aligned to
 * 16 bytes. Chunks double up to 1 MiB. A large request that does not fit gets a chunk of its own
 * after the newest, so that the free space of the newest is not lost. */
#include "base.h"

#include <stdio.h>

enum { ALIGN = 16, FIRST_CHUNK = 8 << 10, LARGEST_CHUNK = 1 << 20 };

typedef struct pm_chunk {
  struct pm_chunk *next;
  size_t size;
} pm_chunk;

_Static_assert(sizeof(pm_chunk) % ALIGN == 0, "what follows a chunk's head must be aligned");

void pm_arena_init(pm_arena *a) { *a = (pm_arena){0}; }

void pm_arena_free(pm_arena *a) {
  for (pm_chunk *c = a->head; c;) {
    pm_chunk *next = c->next;
    pm_free(c);
    c = next;
  }
  pm_arena_init(a);
}

static pm_chunk *new_chunk(pm_arena *a, size_t size) {
  pm_chunk *c = pm_malloc(sizeof *c + size);
  if (!c) pm_out_of_memory(size);
  c->size = size;
  a->total += sizeof *c + size;
  return c;
}

static void *alloc_slow(pm_arena *a, size_t bytes) {
  size_t size = a->head ? a->head->size * 2 : FIRST_CHUNK;
  if (size > LARGEST_CHUNK) size = LARGEST_CHUNK;
  if (bytes > size / 4 && a->head) {
    pm_chunk *c = new_chunk(a, bytes);
    c->next = a->head->next;
    a->head->next = c;
    return c + 1;
  }
  if (size < bytes) size = bytes;
  pm_chunk *c = new_chunk(a, size);
  c->next = a->head;
  a->head = c;
  a->at = (char *)(c + 1) + bytes;
  a->end = (char *)(c + 1) + size;
  return c + 1;
}

void *pm_alloc(pm_arena *a, size_t bytes) {
  if (bytes > SIZE_MAX / 4) pm_out_of_memory(bytes);
  bytes = (bytes + ALIGN - 1) & ~(size_t)(ALIGN - 1);
  void *p;
  if (bytes <= (size_t)(a->end - a->at)) {
    p = a->at;
    a->at += bytes;
  } else {
    p = alloc_slow(a, bytes);
  }
  return bytes ? memset(p, 0, bytes) : p;
}

char *pm_strdup(pm_arena *a, const char *s, size_t n) {
  char *p = pm_alloc(a, n + 1);
  if (n) memcpy(p, s, n);
  return p;
}

char *pm_printf(pm_arena *a, const char *fmt, ...) {
  pm_text t;
  pm_text_init(&t, a);
  va_list ap;
  va_start(ap, fmt);
  pm_vputf(&t, fmt, ap);
  va_end(ap);
  return t.at;
}

void *pm_vec_grow(pm_arena *a, void *at, uint32_t n, uint32_t *cap, size_t size, uint32_t need) {
  if (need < n) pm_out_of_memory(SIZE_MAX); /* n + 1 wrapped */
  if (need <= *cap) return at;
  uint64_t want = *cap ? *cap : 8;
  while (want < need) want *= 2;
  if (want > UINT32_MAX) want = UINT32_MAX;
  void *p = pm_alloc(a, (size_t)want * size);
  if (n) memcpy(p, at, n * size);
  *cap = (uint32_t)want;
  return p;
}

/* ---- text --------------------------------------------------------------------------------- */

void pm_text_init(pm_text *t, pm_arena *a) { *t = (pm_text){.arena = a}; }

/* Room for n more bytes and the NUL. */
static void text_reserve(pm_text *t, size_t n) {
  uint64_t need = (uint64_t)t->n + n + 1;
  if (need <= t->cap) return;
  uint64_t cap = t->cap ? t->cap : 64;
  while (cap < need) cap *= 2;
  if (cap > UINT32_MAX) pm_out_of_memory(cap);
  char *p = pm_alloc(t->arena, cap);
  if (t->n) memcpy(p, t->at, t->n);
  t->at = p;
  t->cap = (uint32_t)cap;
}

void pm_putn(pm_text *t, const char *s, size_t n) {
  text_reserve(t, n);
  if (n) memcpy(t->at + t->n, s, n);
  t->n += (uint32_t)n;
  t->at[t->n] = 0;
}

void pm_put(pm_text *t, const char *s) { pm_putn(t, s, strlen(s)); }

static void put_number(pm_text *t, uint64_t x, bool negative) {
  char digits[21], *at = digits + sizeof digits;
  do *--at = (char)('0' + x % 10);
  while (x /= 10);
  if (negative) *--at = '-';
  pm_putn(t, at, (size_t)(digits + sizeof digits - at));
}

static void put_signed(pm_text *t, int64_t x) {
  put_number(t, x < 0 ? -(uint64_t)x : (uint64_t)x, x < 0);
}

/* The conversions that programs consist of, many times faster than by vsnprintf: %s, %.*s, %c, %d,
 * %u, %lld, %llu, %%. False: there is another one. */
static bool put_simple(pm_text *t, const char *fmt, va_list ap) {
  while (*fmt) {
    const size_t n = strcspn(fmt, "%");
    pm_putn(t, fmt, n);
    fmt += n;
    if (!*fmt) return true;
    if (fmt[1] == 's') {
      const char *s = va_arg(ap, const char *);
      pm_put(t, s ? s : "(null)");
    } else if (fmt[1] == 'u') {
      put_number(t, va_arg(ap, unsigned), false);
    } else if (fmt[1] == 'd') {
      put_signed(t, va_arg(ap, int));
    } else if (fmt[1] == 'c') {
      pm_putn(t, &(char){(char)va_arg(ap, int)}, 1);
    } else if (fmt[1] == '%') {
      pm_putn(t, "%", 1);
    } else if (!strncmp(fmt, "%lld", 4)) {
      put_signed(t, va_arg(ap, long long));
      fmt += 2;
    } else if (!strncmp(fmt, "%llu", 4)) {
      put_number(t, va_arg(ap, unsigned long long), false);
      fmt += 2;
    } else if (!strncmp(fmt, "%.*s", 4)) {
      const int most = va_arg(ap, int);
      const char *s = va_arg(ap, const char *);
      pm_putn(t, s, most < 0 ? strlen(s) : strnlen(s, (size_t)most));
      fmt += 2;
    } else {
      return false;
    }
    fmt += 2;
  }
  return true;
}

static void put_any(pm_text *t, const char *fmt, va_list ap) {
  va_list again;
  va_copy(again, ap);
  size_t room = t->cap - t->n;
  int n = vsnprintf(t->at + t->n, room, fmt, ap);
  if (n > 0 && (size_t)n >= room) {
    text_reserve(t, (size_t)n);
    vsnprintf(t->at + t->n, (size_t)n + 1, fmt, again);
  }
  va_end(again);
  if (n > 0) t->n += (uint32_t)n;
}

void pm_vputf(pm_text *t, const char *fmt, va_list ap) {
  const uint32_t before = t->n;
  va_list again;
  va_copy(again, ap);
  text_reserve(t, 0);
  t->at[t->n] = 0;
  if (!put_simple(t, fmt, ap)) {
    t->n = before;
    put_any(t, fmt, again);
  }
  va_end(again);
}

void pm_putf(pm_text *t, const char *fmt, ...) {
  va_list ap;
  va_start(ap, fmt);
  pm_vputf(t, fmt, ap);
  va_end(ap);
}

void pm_put_dims(pm_text *t, const int64_t *dims, uint32_t n) {
  pm_put(t, "(");
  for (uint32_t k = 0; k < n; k++) pm_putf(t, k ? ", %lld" : "%lld", (long long)dims[k]);
  pm_put(t, n == 1 ? ",)" : ")");
}
