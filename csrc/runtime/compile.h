/* Inside runtime/: the parts of pm_compile. */
#ifndef PM_COMPILE_H
#define PM_COMPILE_H

#include "runtime.h"

/* ---- nvrtc.c ------------------------------------------------------------------------------ */

/* Which libnvrtc would be opened: its path, size and modification time, as text; borrowed. Opens a
 * library only where none of the places with a known path has one. */
pm_code pm_nvrtc_identity(char *out, size_t size, pm_err *err);

enum { PM_MAX_OPTIONS = 256 };
typedef struct pm_options {
  const char *at[PM_MAX_OPTIONS];
  int n;
  bool full; /* one more was to be added */
  char buffer[8192];
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

/* ---- cubin.c ------------------------------------------------------------------------------ */

typedef struct pm_sections {
  const unsigned char *base;
  size_t size, table, names_size;
  const char *names;
  uint32_t n;
} pm_sections;

typedef struct pm_section {
  const char *name;
  const unsigned char *at;
  size_t size;
  uint32_t code_of; /* of a section with records: the number of the code that they are about */
  bool is_code;
} pm_section;
/* false: it is no ELF file of 64 bits. The sections are borrowed from the image. */
bool pm_sections_of(const void *image, size_t size, pm_sections *out);
bool pm_section_at(const pm_sections *s, uint32_t k, pm_section *out);
/* Registers, stack and spills, where they are -1. Spills stay so if the compiler is older than
 * CUDA 12.9 and the cubin has a stack. */
void pm_cubin_figures(pm_cubin *c);

/* ---- cache.c ------------------------------------------------------------------------------ */

/* false: no usable entry. On success *out is filled. */
bool pm_cache_read(const uint64_t key[2], pm_cubin *out);
/* Best effort: failures leave no entry, and a complaint (pm_cache_complaint). */
void pm_cache_write(const uint64_t key[2], const pm_cubin *c);

#endif
