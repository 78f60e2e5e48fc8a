/* From a synchronised graph to CUDA C++ text and everything that a launch needs to know. */
#ifndef PM_CUDA_H
#define PM_CUDA_H

#include "../passes/passes.h"

/* COUNTERS: pointer to n_counters + 1 words of u32, zero when the launch begins; the kernel leaves
 * them zero. No other launch that runs at the same time may have the same words. */
typedef enum pm_arg_kind { PM_ARG_TENSOR_MAP, PM_ARG_POINTER, PM_ARG_COUNTERS } pm_arg_kind;

typedef struct pm_program {
  const char *text; /* CUDA C++, self-contained, with #line */
  size_t size;
  const char *entry; /* extern "C" name */
  uint32_t grid[3], cluster[3], block;
  bool shares_grid;    /* any number of clusters will do, of which grid says the most; they lie
                        * along x */
  uint32_t smem_bytes; /* dynamic */
  bool pdl;
  const pm_target *target;
  uint32_t n_counters;
  bool meets_blocks; /* blocks of the launch wait for each other */
  uint32_t n_args;   /* kernel parameters in order: tensor maps, pointers, counters */
  struct pm_program_arg {
    uint8_t kind;  /* pm_arg_kind */
    int32_t param; /* kernel argument (operands, then outputs); COUNTERS: -1 */
    uint32_t map;  /* TENSOR_MAP: index in maps */
  } * args;
  uint32_t n_maps;
  pm_tensor_map *maps;
  uint32_t n_params;  /* operands and outputs */
  int64_t *align;     /* per param: bytes its pointer must be aligned to */
  const char **names; /* per param: the user's name, "" if unknown */
} pm_program;

typedef struct pm_cuda_options {
  bool line_directives; /* #line to the user's Python */
  bool entry_only;      /* without the device functions: for another catalogue */
} pm_cuda_options;

/* All memory in g->arena. */
pm_code pm_generate_cuda(const pm_graph *g, const pm_cuda_options *o, pm_program *out, pm_err *err);

#endif
