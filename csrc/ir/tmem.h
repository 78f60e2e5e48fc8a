/* Tensor memory (TMEM): of each block 128 lanes of 512 columns of 32 bits, and where the elements
 * of refs in it lie.
 *
 * A ref of shape (batch.., rows, columns) has a layout for its last two dimensions and a packing p,
 * the elements that share 32 bits, the first of them in the lowest bits. C is `columns`; lanes and
 * columns of TMEM count from the ref's first one:
 *
 *   layout        rows      lane of (i, j)                                column of (i, j)
 *   default       128       i                                             j / p
 *   half_lane     64        32 (i / 16) + 16 (j / (C/2)) + i % 16         j % (C/2) / p
 *   m64_coll.     64        64 (j / (C/2)) + i                            j % (C/2) / p
 *   scales        128, 256  32 q + i % 32, for all q in 0..3              below
 *   scales_m64    256       64 (i / 128) + 32 q + i % 32, q in 0..1       j / 4 * 4 + i % 128 / 32
 *   metadata      128       i                                             j / 16
 *
 * The column of scales is  j / 4 * 4 (rows / 128) + 4 (i / 128) + i % 128 / 32.
 * Of scales p is 4, element j % 4 of the 32 bits; scales and metadata are replicated or opaque:
 * what (i, j) of metadata means is that of the copy's tile (128, 64). The matrices of a batch
 * follow each other along the columns. */
#ifndef PM_TMEM_H
#define PM_TMEM_H

#include "view.h"

enum { PM_TMEM_LANES = 128 };

/* An allocation. */
typedef struct pm_tmem {
  uint8_t layout; /* PM_TMEM_DEFAULT .. */
  pm_dtype dtype;
  int packing;
  int64_t batch, rows, columns;
  int64_t width;  /* columns of TMEM that one matrix takes */
  int64_t offset; /* of the first one; -1: not planned */
  bool pair;
} pm_tmem;
/* Why there is no such allocation in this layout and packing, NULL if there is. */
const char *pm_tmem_refusal(pm_arena *arena, const pm_type *type, int64_t layout, int64_t packing);
/* Of a well-typed ALLOC_TMEM. */
pm_tmem pm_tmem_of(const pm_graph *g, pm_opid alloc);
/* Columns of TMEM that the ref takes: its matrices, in units of 4. */
int64_t pm_tmem_size(const pm_tmem *m);
/* A slice along the columns has a start and a size that are multiples of it. */
int64_t pm_tmem_tile(const pm_tmem *m);

/* A view: some of the columns of one matrix, or, of a whole ref, of all. */
typedef struct pm_tmem_view {
  pm_opid alloc;
  pm_tmem of;
  int64_t batch, rows, columns; /* elements of the view */
  int64_t column;               /* of TMEM, from the ref's first one: the static part */
  uint32_t n_terms;
  pm_term term[PM_MAX_TERMS]; /* column += val / div * mul */
} pm_tmem_view;
pm_code pm_tmem_view_of(const pm_graph *g, pm_val ref, pm_tmem_view *out, pm_err *err);
/* The ALLOC_TMEM of a view; 0: it is not in TMEM. */
pm_opid pm_tmem_alloc(const pm_graph *g, pm_val ref);

/* Where element (i, j) of a matrix lies, from the matrix's first column: copy k of pm_tmem_copies.
 */
typedef struct pm_tmem_cell {
  int lane, bit;
  int64_t column;
} pm_tmem_cell;
pm_tmem_cell pm_tmem_at(const pm_tmem *m, int64_t i, int64_t j, int k);
int pm_tmem_copies(const pm_tmem *m);

/* The k-th register layout in which `array`, of the shape of the view `ref`, can be loaded from it
 * and stored to it, the default one first; 0: there are no more. `rows`: whole rows in each lane.
 */
pm_layid pm_tmem_registers(pm_graph *g, pm_val ref, const pm_type *array, bool rows, uint32_t k);

/* ---- products ------------------------------------------------------------------------------ */

/* Operands of a TCGEN05_MMA; 0: it has none. */
typedef struct pm_tcgen05 {
  pm_val acc, a, b, accumulate, a_scale, b_scale, metadata;
  bool pair, in_tmem;       /* a is */
  int packed;               /* elements of a and b that share a byte of SMEM */
  int64_t m, n, k;          /* of one block, of the accumulator, of b */
  int64_t block;            /* elements of b along K that one scale is for; 0: no scales */
  const struct pm_mma *row; /* of mma.def */
} pm_tcgen05;
pm_tcgen05 pm_tcgen05_of(const pm_graph *g, pm_opid op);

#endif
