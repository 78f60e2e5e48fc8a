/* Conversions between register layouts without shared memory.
 *
 * If two layouts number the warps in the same way, they differ in which bits of an index are digits
 * of the lane and which of the register. Step by step, one bit of the lane is exchanged with one
 * bit of the register: of each two registers that differ only in that bit, lanes with the bit clear
 * send the second and lanes with it set send the first, and both receive the other half by a
 * butterfly shuffle. Finally, lanes may have to exchange places, by one shuffle of all registers,
 * and registers are renamed, which is free. */
#ifndef PM_RELAYOUT_H
#define PM_RELAYOUT_H

#include "layout.h"

enum { PM_MAX_SWAPS = 5 };

typedef struct pm_relayout {
  uint32_t n_swaps;
  struct {
    int lane_bit;
    int64_t step; /* of the register bit: 1, 2, 4 ... times odd sizes below it */
  } swap[PM_MAX_SWAPS];
  bool permutes; /* lanes take each other's places, */
  uint8_t
      place[5]; /* bit k of the number of the lane that is read is bit place[k] of the reader's */
  int64_t n_regs;
  int32_t *map; /* result register -> register after all swaps */
} pm_relayout;

/* The steps from one layout to the other, both of one shape; false: there are none of this form.
 * Memory from `a`. */
bool pm_relayout_plan(pm_arena *a, const pm_layout *from, const pm_layout *to, pm_relayout *out);
/* Elements that fit in the words of a swap's shuffles: n of them, `apart` registers from each
 * other. */
void pm_relayout_words(const pm_relayout *r, int64_t step, int64_t bytes, int64_t *n,
                       int64_t *apart);
/* 32-bit shuffles of a lane for elements of so many bytes. */
int64_t pm_relayout_shuffles(const pm_relayout *r, int64_t bytes);
/* Is it faster than through shared memory? */
bool pm_relayout_pays(const pm_relayout *r, int64_t bytes);

#endif
