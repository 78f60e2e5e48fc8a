/* Ground floor of the core: error record, arena, growing arrays, text builder, numbers.
 *
 * Invariants
 *   - No function here or in any folder but python/ knows Python.
 *   - A function that can fail for a reason the user can mend returns pm_code and fills one pm_err.
 *   - Memory of one compilation lives in one arena and is freed whole. An arena that cannot grow
 *     leaves through pm_protect() (longjmp) as PM_E_MEMORY; core code never sees NULL from it.
 *     So code that runs below pm_protect owns nothing but arena memory, or frees it by other means.
 */
#ifndef PM_BASE_H
#define PM_BASE_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__GNUC__)
#define PM_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#define PM_NORETURN __attribute__((noreturn))
#else
#define PM_PRINTF(fmt, args)
#define PM_NORETURN
#endif
#define PM_COUNT(array) (sizeof(array) / sizeof((array)[0]))

/* ---- errors ------------------------------------------------------------------------------- */

typedef enum pm_code {
  PM_OK = 0,
#define PM_ERROR(name, exception, when) PM_E_##name,
#include "errors.def"
#undef PM_ERROR
  PM_CODE_COUNT
} pm_code;

typedef struct pm_err {
  pm_code code;
  uint32_t line;   /* 0: no place in the user's Python is known */
  char file[512];  /* the user's file */
  char text[6144]; /* what went wrong, in full sentences, without the place */
} pm_err;

/* Fill `err` and return `code`. The place is left as it is. */
pm_code pm_fail(pm_err *err, pm_code code, const char *fmt, ...) PM_PRINTF(3, 4);
/* Set the place, if none is set yet. */
void pm_err_at(pm_err *err, const char *file, uint32_t line);
const char *pm_code_exception(pm_code code); /* second column of errors.def */

/* Run fn(ctx, err); an arena that runs out of memory inside makes it return PM_E_MEMORY. Nests. */
typedef pm_code (*pm_body)(void *ctx, pm_err *err);
pm_code pm_protect(pm_body fn, void *ctx, pm_err *err);
PM_NORETURN void pm_out_of_memory(size_t bytes);
/* Test hook: the n-th allocation from now fails (0: none). */
void pm_fail_allocation(long n);
/* malloc, realloc and free that honour the hook; NULL on failure, for buffers with an owner. What
 * pm_malloc_lines returns begins a cache line: no vector at a multiple of its size lies in two. */
void *pm_malloc(size_t bytes);
void *pm_malloc_lines(size_t bytes);
void *pm_realloc(void *old, size_t bytes);
void pm_free(void *p);

/* ---- arena -------------------------------------------------------------------------------- */

typedef struct pm_arena {
  struct pm_chunk *head;
  char *at, *end;
  size_t total;
} pm_arena;

void pm_arena_init(pm_arena *a);
void pm_arena_free(pm_arena *a);           /* frees all; the arena may be used again */
void *pm_alloc(pm_arena *a, size_t bytes); /* 16-byte aligned, zeroed; never NULL */
char *pm_strdup(pm_arena *a, const char *s, size_t n);
char *pm_printf(pm_arena *a, const char *fmt, ...) PM_PRINTF(2, 3);
#define PM_NEW(a, type, n) ((type *)pm_alloc((a), sizeof(type) * (size_t)(n)))

/* Growing array in an arena: struct { T *at; uint32_t n, cap; }. Growth doubles and abandons. */
#define PM_VEC(T)    \
  struct {           \
    T *at;           \
    uint32_t n, cap; \
  }
void *pm_vec_grow(pm_arena *a, void *at, uint32_t n, uint32_t *cap, size_t size, uint32_t need);
#define pm_vec_reserve(a, v, need) \
  ((v)->at = pm_vec_grow((a), (v)->at, (v)->n, &(v)->cap, sizeof *(v)->at, (need)))
#define pm_vec_push(a, v, x)                                      \
  do {                                                            \
    if ((v)->n == (v)->cap) pm_vec_reserve((a), (v), (v)->n + 1); \
    (v)->at[(v)->n++] = (x);                                      \
  } while (0)

/* ---- text --------------------------------------------------------------------------------- */

/* Text builder in an arena. `at` is always NUL-terminated once anything was added. */
typedef struct pm_text {
  pm_arena *arena;
  char *at;
  uint32_t n, cap;
} pm_text;

void pm_text_init(pm_text *t, pm_arena *a);
void pm_put(pm_text *t, const char *s);
void pm_putn(pm_text *t, const char *s, size_t n);
void pm_putf(pm_text *t, const char *fmt, ...) PM_PRINTF(2, 3);
void pm_vputf(pm_text *t, const char *fmt, va_list ap);
void pm_put_dims(pm_text *t, const int64_t *dims, uint32_t n); /* "(8, 64)", "(8,)", "()" */

/* ---- numbers ------------------------------------------------------------------------------ */

static inline int64_t pm_cdiv(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t pm_round_up(int64_t a, int64_t b) { return pm_cdiv(a, b) * b; }
static inline int64_t pm_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t pm_max(int64_t a, int64_t b) { return a > b ? a : b; }
static inline bool pm_is_pow2(int64_t a) { return a > 0 && (a & (a - 1)) == 0; }
int64_t pm_gcd(int64_t a, int64_t b); /* pm_gcd(0, b) == |b| */

uint64_t pm_hash(const void *p, size_t n, uint64_t seed); /* for tables that compare in full */
void pm_digest(const void *p, size_t n, uint64_t out[2]); /* for what is not compared: SHA-256 */

#endif
