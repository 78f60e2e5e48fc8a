/* Errors, protected calls and raw allocation.
 *
 * pm_protect keeps a stack of jump targets for each thread; pm_out_of_memory unwinds to the newest.
 * A thread that runs out of memory outside pm_protect cannot report it, and ends the process. */
#include "base.h"

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- errors ------------------------------------------------------------------------------- */

static const char *const exceptions[PM_CODE_COUNT] = {
    NULL,
#define PM_ERROR(name, exception, when) exception,
#include "errors.def"
#undef PM_ERROR
};

const char *pm_code_exception(pm_code code) { return exceptions[code]; }

pm_code pm_fail(pm_err *err, pm_code code, const char *fmt, ...) {
  char text[sizeof err->text]; /* the arguments may point into *err */
  va_list ap;
  va_start(ap, fmt);
  vsnprintf(text, sizeof text, fmt, ap);
  va_end(ap);
  memcpy(err->text, text, strlen(text) + 1);
  err->code = code;
  return code;
}

void pm_err_at(pm_err *err, const char *file, uint32_t line) {
  if (err->line || !line) return;
  err->line = line;
  snprintf(err->file, sizeof err->file, "%s", file ? file : "");
}

/* ---- protected calls ---------------------------------------------------------------------- */

typedef struct frame {
  jmp_buf target;
  struct frame *up;
  volatile size_t bytes;
} frame;

static _Thread_local frame *newest;

pm_code pm_protect(pm_body fn, void *ctx, pm_err *err) {
  frame f;
  pm_code code;
  f.up = newest;
  f.bytes = 0;
  if (setjmp(f.target) == 0) {
    newest = &f;
    code = fn(ctx, err);
  } else {
    code =
        pm_fail(err, PM_E_MEMORY, "the host is out of memory (%zu bytes were asked for)", f.bytes);
  }
  newest = f.up;
  return code;
}

void pm_out_of_memory(size_t bytes) {
  frame *f = newest;
  if (!f) {
    fprintf(stderr, "pallas_mgpu: out of memory (%zu bytes)\n", bytes);
    abort();
  }
  f->bytes = bytes;
  longjmp(f->target, 1);
}

/* ---- allocation --------------------------------------------------------------------------- */

static _Thread_local long fail_after; /* 0: the hook is off */

void pm_fail_allocation(long n) { fail_after = n > 0 ? n : 0; }

static bool must_fail(void) { return fail_after && --fail_after == 0; }

void *pm_malloc(size_t bytes) { return must_fail() ? NULL : malloc(bytes ? bytes : 1); }

void *pm_malloc_lines(size_t bytes) {
  enum { LINE = 64 };
  return must_fail() ? NULL : aligned_alloc(LINE, bytes / LINE * LINE + LINE);
}

void *pm_realloc(void *old, size_t bytes) {
  return must_fail() ? NULL : realloc(old, bytes ? bytes : 1);
}

void pm_free(void *p) { free(p); }

/* ---- numbers ------------------------------------------------------------------------------ */

int64_t pm_gcd(int64_t a, int64_t b) {
  uint64_t x = a < 0 ? -(uint64_t)a : (uint64_t)a, y = b < 0 ? -(uint64_t)b : (uint64_t)b;
  while (y) {
    uint64_t r = x % y;
    x = y;
    y = r;
  }
  return x > INT64_MAX ? INT64_MAX / 2 + 1 : (int64_t)x; /* 2^63 does not fit; 2^62 divides it */
}
