/* Instructions of the fifth generation of tensor cores as numbers: descriptors, addresses, shapes.
 *
 * Pure functions of a few numbers, without a graph: emit_tcgen05.c prints what they give, and tests
 * compare them with instructions that a compiler proven on the GPU emitted. */
#ifndef PM_TCGEN05_H
#define PM_TCGEN05_H

#include "../base/base.h"
#include "../base/dtype.h"

/* ---- products ------------------------------------------------------------------------------ */

/* An operand in shared memory: rows of `swizzle` bytes along the dimension that is contiguous,
 * eight of which are a group. */
typedef struct pm_tcgen05_operand {
  bool k_major;    /* K is contiguous */
  uint8_t swizzle; /* 32, 64 or 128 bytes */
  int64_t chunk,
      group; /* bytes to the next row along the contiguous dimension; to the next group */
} pm_tcgen05_operand;

/* D (rows, columns) += A (rows, k) B (k, columns). Of a pair of blocks: rows and b_columns are of
 * one of them, and D has twice as many rows and columns. */
typedef struct pm_tcgen05_product {
  const char *kind;        /* .kind:: and what follows, of mma.def */
  pm_dtype a, b, d, scale; /* scale: of the scales, if block > 0 */
  int block;               /* elements along K that share a scale; 0: no scales */
  bool sparse, pair, a_in_tmem;
  int64_t rows, b_columns, k; /* k: of B */
  pm_tcgen05_operand in_a, in_b;
} pm_tcgen05_product;

/* One instruction. */
typedef struct pm_tcgen05_step {
  uint32_t instruction;      /* the instruction descriptor */
  uint32_t d;                /* added to the address of D: lane << 16 | column */
  int64_t a, b;              /* bytes added to the addresses; of A in tensor memory: columns */
  uint32_t a_scale, b_scale; /* columns added to their addresses */
  uint32_t metadata;
  bool first; /* of its columns of D: it overwrites them if the product does not accumulate */
} pm_tcgen05_step;

int64_t pm_tcgen05_k(const pm_tcgen05_product *p);  /* elements of B along K of one instruction */
int pm_tcgen05_pieces(const pm_tcgen05_product *p); /* instructions along the columns of D */
int64_t pm_tcgen05_steps(const pm_tcgen05_product *p); /* instructions along K */
pm_tcgen05_step pm_tcgen05_at(const pm_tcgen05_product *p, int piece, int64_t step);
/* "tcgen05.mma.sp.cta_group::1.kind::f16" */
const char *pm_tcgen05_name(pm_arena *a, const pm_tcgen05_product *p);

/* A descriptor of a matrix in shared memory, but for its address. */
uint64_t pm_tcgen05_matrix(int64_t leading, int64_t stride, int swizzle);
uint64_t pm_tcgen05_matrix_of(const pm_tcgen05_operand *o);

/* ---- between registers and tensor memory --------------------------------------------------- */

/* Where a lane of a warpgroup has its part of an array in tensor memory: the cell of register
 * `reg` of lane `tid`, and which element of the cell. False: the register is padding. */
typedef struct pm_tcgen05_cell {
  uint32_t lane, column, slot;
} pm_tcgen05_cell;
typedef bool (*pm_tcgen05_cells)(const void *ctx, int tid, int64_t reg, pm_tcgen05_cell *out);

typedef enum pm_tcgen05_shape {
  PM_TCGEN05_32X32B,
  PM_TCGEN05_16X256B,
  PM_TCGEN05_16X128B,
  PM_TCGEN05_SHAPES
} pm_tcgen05_shape;

/* A load or store as instructions. Words of 32 bits: word w of a lane is its registers w * per_word
 * to (w + 1) * per_word - 1. */
typedef struct pm_tcgen05_move {
  pm_tcgen05_shape shape;
  bool halves; /* of 16 bits, each in a cell of its own: .pack::16b, .unpack::16b */
  int per_word;
  uint32_t n;
  struct pm_tcgen05_part {
    uint32_t address;     /* added to that of the array: lane << 16 | column */
    uint32_t times;       /* .x1 to .x32 */
    uint32_t words;       /* registers of the instruction */
    const uint16_t *word; /* of each */
  } * part;
} pm_tcgen05_move;

/* False: no shape moves registers so. bits: of an element, in `packing` of which share a cell. */
bool pm_tcgen05_plan_move(pm_arena *a, pm_tcgen05_cells cells, const void *ctx, int64_t registers,
                          int bits, int packing, pm_tcgen05_move *out);
/* "16x256b.x8" */
const char *pm_tcgen05_shape_text(pm_arena *a, const pm_tcgen05_move *m, uint32_t part);

#endif
