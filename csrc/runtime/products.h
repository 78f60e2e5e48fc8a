/* Inside runtime/: products that PTX asks for, and those that machine code has. */
#ifndef PM_PRODUCTS_H
#define PM_PRODUCTS_H

#include "../base/base.h"

/* PM_PRODUCT(name in SASS, bits 0 to 8 of an instruction): as nvdisasm reads them, which
 * tests/compiler/test_compilers.py compares. */
#define PM_PRODUCTS(PM_PRODUCT) \
  PM_PRODUCT(HGMMA, 0x1f0)      \
  PM_PRODUCT(IGMMA, 0x1f1)      \
  PM_PRODUCT(BGMMA, 0x1f2)      \
  PM_PRODUCT(QGMMA, 0x1f3)      \
  PM_PRODUCT(HMMA, 0x03c)       \
  PM_PRODUCT(QMMA, 0x07a)       \
  PM_PRODUCT(IMMA, 0x037)       \
  PM_PRODUCT(BMMA, 0x03d)       \
  PM_PRODUCT(DMMA, 0x03f)

typedef enum pm_product {
#define PM_PRODUCT(name, bits) PM_PRODUCT_##name,
  PM_PRODUCTS(PM_PRODUCT)
#undef PM_PRODUCT
      PM_PRODUCT_COUNT,
  PM_PRODUCT_NONE = PM_PRODUCT_COUNT
} pm_product;

/* ptx.c. Is the PTX for a GPU whose mma takes 8-bit floats (sm_89, sm_120, sm_121)? Others convert
 * them to float16. */
bool pm_has_qmma(const char *ptx);

/* What an instruction of PTX becomes, by its name with all modifiers, which ends at a blank. qmma:
 * pm_has_qmma of the text. */
pm_product pm_product_of(const char *name, bool qmma);

/* Products of each kind that a compiler may not leave out (ptx.c). */
void pm_ptx_products(const char *ptx, uint32_t n[PM_PRODUCT_COUNT]);

#endif
