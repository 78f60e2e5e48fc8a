/* Does the machine code contain every product of the PTX?
 *
 * Two versions of ptxas silently drop wgmma instructions (docs/compilers.md). So after every
 * compilation, the tensor-core instructions of each kind in the .text sections of the cubin are
 * counted by their opcodes, and those of the PTX by their names, in one pass over each. One
 * instruction in PTX may become several, and unrolled loops contain more of them. Fewer are correct
 * only if results are unused or two products are identical. So if this quick count finds fewer,
 * ptx.c determines which products are needed, and if some of these are missing, the cubin is
 * refused. */
#include "products.h"

#include <ctype.h>

#include "../base/env.h"
#include "compile.h"

static const struct {
  const char *name;
  uint32_t bits;
} products[] = {
#define PM_PRODUCT(name, bits) {#name, bits},
    PM_PRODUCTS(PM_PRODUCT)
#undef PM_PRODUCT
};

/* ---- PTX ---------------------------------------------------------------------------------- */

/* All that look like products, in comments too. */
static void count_names(const char *ptx, uint32_t n[PM_PRODUCT_COUNT]) {
  const bool qmma = pm_has_qmma(ptx);
  for (const char *at = ptx; (at = strstr(at, "mma")); at += 3) {
    const char *name = at;
    while (name > ptx && isalnum((unsigned char)name[-1])) name--;
    const pm_product kind = pm_product_of(name, qmma);
    if (kind < PM_PRODUCT_COUNT) n[kind]++;
  }
}

/* ---- machine code ------------------------------------------------------------------------- */

/* Instructions of 16 bytes, the opcode in the lowest bits. */
static void count_opcodes(const unsigned char *at, size_t size, uint32_t n[PM_PRODUCT_COUNT]) {
  uint32_t seen[512] = {0};
  for (size_t k = 0; k + 16 <= size; k += 16) seen[(at[k] | at[k + 1] << 8) & 511]++;
  for (int k = 0; k < PM_PRODUCT_COUNT; k++) n[k] += seen[products[k].bits];
}

/* false: it is no cubin. */
static bool count_cubin(const void *image, size_t size, uint32_t n[PM_PRODUCT_COUNT]) {
  pm_sections sections;
  pm_section s;
  if (!pm_sections_of(image, size, &sections)) return false;
  for (uint32_t k = 0; k < sections.n; k++) {
    if (!pm_section_at(&sections, k, &s)) return false;
    if (s.is_code) count_opcodes(s.at, s.size, n);
  }
  return true;
}

/* ---- the comparison ----------------------------------------------------------------------- */

static int lacking(const uint32_t want[PM_PRODUCT_COUNT], const uint32_t have[PM_PRODUCT_COUNT]) {
  for (int k = 0; k < PM_PRODUCT_COUNT; k++) {
    if (have[k] < want[k]) return k;
  }
  return PM_PRODUCT_NONE;
}

typedef struct needed {
  const char *ptx;
  uint32_t n[PM_PRODUCT_COUNT];
} needed;

static pm_code find_needed(void *ctx, pm_err *err) {
  needed *x = ctx;
  (void)err;
  pm_ptx_products(x->ptx, x->n);
  return PM_OK;
}

pm_code pm_check_products(const char *ptx, const void *image, size_t size, const char *entry,
                          pm_err *err) {
  needed want = {.ptx = ptx};
  uint32_t have[PM_PRODUCT_COUNT] = {0};
  int major, minor;
  const char *path;
  count_names(ptx, want.n);
  if (lacking(want.n, have) == PM_PRODUCT_NONE) return PM_OK; /* no products */
  if (count_cubin(image, size, have) && lacking(want.n, have) == PM_PRODUCT_NONE) return PM_OK;
  if (pm_protect(find_needed, &want, err)) return err->code;
  const int k = lacking(want.n, have);
  if (k == PM_PRODUCT_NONE || pm_nvrtc_version(&major, &minor, &path, err)) return err->code;
  return pm_fail(err, PM_E_COMPILE,
                 "NVRTC %d.%d lost tensor-core instructions of kernel %s: %u of its products must "
                 "become %s, and the machine code has %u. Its results would be wrong, so it is not "
                 "run. This is a bug of that compiler (%s). Use another version, such as 13.2: pip "
                 "install 'nvidia-cuda-nvrtc==13.2.*', or name one in %s",
                 major, minor, entry, want.n[k], products[k].name, have[k], path,
                 pm_env_table[PM_ENV_NVRTC].variable);
}
