/* What tensor cores multiply: the rows of mma.def. */
#ifndef PM_MMA_H
#define PM_MMA_H

#include "layout.h"

typedef enum pm_majors { PM_MAJORS_NONE, PM_MAJORS_K, PM_MAJORS_ANY } pm_majors;

enum { PM_LAYOUT_NONE = PM_LAYOUT_COUNT };

typedef struct pm_mma {
  uint8_t op, a, b, acc;
  const char *types; /* "e4m3.e5m2" */
  int16_t k, n, most_n;
  uint8_t in[3]; /* pm_layout_name_id of acc, a, b; PM_LAYOUT_NONE: in shared memory */
  uint8_t majors;
  uint8_t scale;  /* their dtype */
  int16_t block;  /* elements along K that one is for; 0: the operands have no scales */
  uint32_t needs; /* PM_HAS_ */
} pm_mma;

extern const pm_mma pm_mmas[];
extern const uint32_t pm_mma_count;

/* Of operands without scales. NULL: there is none. */
const pm_mma *pm_mma_find(pm_opcode op, pm_dtype a, pm_dtype b, pm_dtype acc);
/* With scales of this dtype for `block` elements of K each. */
const pm_mma *pm_mma_find_scaled(pm_opcode op, pm_dtype a, pm_dtype b, pm_dtype acc, pm_dtype scale,
                                 int64_t block);
/* Of a WGMMA, MMA or TCGEN05_MMA; NULL for other ops. */
const pm_mma *pm_mma_of(const pm_graph *g, pm_opid op);
/* Is there an MMA of the dtypes of this WGMMA? */
bool pm_has_mma(const pm_graph *g, pm_opid wgmma);
/* The layout that operand k (0: acc, which the result has as well) must have as an array; 0: none.
 */
pm_layid pm_mma_layout(pm_graph *g, const pm_mma *m, uint32_t k, const pm_type *array);

#endif
