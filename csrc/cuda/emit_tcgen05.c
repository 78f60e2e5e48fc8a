/* Tensor memory, tcgen05 products, cluster launch control, copies of rows. */
#include "gen.h"

static pm_code missing(pm_gen *e, pm_opid op) {
  return pm_gen_fail(e, op, PM_E_NOT_IMPLEMENTED,
                     "%s on a GPU; run the kernel on the interpreter: interpret=True",
                     pm_ops[pm_get(e->g, op)->code].text);
}

pm_code pm_cuda_GATHER_G2S(pm_gen *e, pm_opid op) { return missing(e, op); }
pm_code pm_cuda_SCATTER_S2G(pm_gen *e, pm_opid op) { return missing(e, op); }
pm_code pm_cuda_TRY_CANCEL(pm_gen *e, pm_opid op) { return missing(e, op); }
pm_code pm_cuda_QUERY_CANCEL(pm_gen *e, pm_opid op) { return missing(e, op); }
pm_code pm_cuda_ALLOC_TMEM(pm_gen *e, pm_opid op) { return missing(e, op); }
pm_code pm_cuda_TCGEN05_MMA(pm_gen *e, pm_opid op) { return missing(e, op); }
pm_code pm_cuda_TCGEN05_COMMIT(pm_gen *e, pm_opid op) { return missing(e, op); }
pm_code pm_cuda_COPY_S2T(pm_gen *e, pm_opid op) { return missing(e, op); }
pm_code pm_cuda_COPY_SCALES(pm_gen *e, pm_opid op) { return missing(e, op); }
pm_code pm_cuda_COPY_METADATA(pm_gen *e, pm_opid op) { return missing(e, op); }
pm_code pm_cuda_LOAD_TMEM(pm_gen *e, pm_opid op) { return missing(e, op); }
pm_code pm_cuda_TMEM_REDUCED(pm_gen *e, pm_opid op) { return missing(e, op); }
pm_code pm_cuda_STORE_TMEM(pm_gen *e, pm_opid op) { return missing(e, op); }
pm_code pm_cuda_COMMIT_TMEM(pm_gen *e, pm_opid op) { return missing(e, op); }
pm_code pm_cuda_WAIT_LOAD_TMEM(pm_gen *e, pm_opid op) { return missing(e, op); }
