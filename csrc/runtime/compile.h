/* Inside runtime/: the parts of pm_compile. */
#ifndef PM_COMPILE_H
#define PM_COMPILE_H

#include "runtime.h"

/* ---- nvrtc.c ------------------------------------------------------------------------------ */

/* Which libnvrtc would be opened: its path, size and modification time, as text; borrowed. Opens a
 * library only where none of the places with a known path has one. */
pm_code pm_nvrtc_identity(char *out, size_t size, pm_err *err);

enum { PM_MAX_OPTIONS = 32 };
typedef struct pm_options {
  const char *at[PM_MAX_OPTIONS];
  int n;
  char buffer[2048];
} pm_options;

typedef struct pm_nvrtc_result {
  char *log; /* pm_free; never NULL after success */
  void *image;
  size_t image_size;
  char *ptx;
  size_t ptx_size;
} pm_nvrtc_result;
/* Compile; `out` gets a cubin and/or PTX as asked. A refusal is PM_E_COMPILE with the log. */
pm_code pm_nvrtc_run(const char *text, const char *entry, const pm_options *o, bool want_cubin,
                     bool want_ptx, pm_nvrtc_result *out, pm_err *err);
void pm_nvrtc_result_free(pm_nvrtc_result *r);

/* ---- cache.c ------------------------------------------------------------------------------ */

/* false: no usable entry. On success *out is filled. */
bool pm_cache_read(const uint64_t key[2], pm_cubin *out);
/* Best effort: failures leave no entry and no error. */
void pm_cache_write(const uint64_t key[2], const pm_cubin *c);

#endif
