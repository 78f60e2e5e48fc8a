/* For tests: programs for sm_100a on a Hopper GPU.
 *
 * The program is what is generated for Blackwell. Its device functions are those for sm_90a, except
 * that stand_in.cuh and stand_in_ptx.cuh replace the ones of tensor memory, its tensor cores and
 * cluster launch control. Tensor memory is global memory, a part for each block. The tensor cores
 * are an engine: a warpgroup of its own in each block, which takes products and commits from a
 * queue, pauses now and then, and executes them by wgmma. So TMA, barriers, clusters, multicasts
 * and all that the host does are real, products are as asynchronous as on Blackwell, and the
 * hardware reads the matrix descriptors.
 *
 * Registers are not handed from thread to thread, as the engine needs some. Launches do not
 * overlap, as blocks with the same number share tensor memory. */
#include "../base/env.h"
#include "../ir/mma.h"
#include "../ir/tmem.h"
#include "gen.h"

bool pm_stand_in_is_on(const pm_graph *g) {
  return pm_env_is_on(PM_ENV_STAND_IN) && g->target == &pm_targets[PM_TARGET_SM_100A];
}

bool pm_stands_in(const pm_gen *e) { return e->options->stand_in && e->g->tmem_columns > 0; }

static pm_code refuse(pm_gen *e, pm_opid op, const char *what) {
  return pm_gen_fail(e, op, PM_E_NOT_IMPLEMENTED, "%s=1: no stand-in for %s; unset it",
                     pm_env_table[PM_ENV_STAND_IN].variable, what);
}

/* Products that wgmma can do: of floats of 16 or 8 bits into float32, the latter with K
 * contiguous. */
static pm_code check_product(pm_gen *e, pm_opid op) {
  const pm_tcgen05 g = pm_tcgen05_of(e->g, op);
  const int bits = pm_dtypes[g.row->a].bits;
  if (g.block) return refuse(e, op, "products with scales");
  if (g.metadata) return refuse(e, op, "sparse products");
  if (g.row->acc != PM_F32) return refuse(e, op, "accumulators other than float32");
  if (g.pair && g.m == 64) return refuse(e, op, "pairs with 64 rows each");
  if (bits == 16) return PM_OK;
  pm_view a, b;
  if (pm_view_of(e->g, g.b, true, &b, e->err)) return e->err->code;
  if (!g.in_tmem && pm_view_of(e->g, g.a, true, &a, e->err)) return e->err->code;
  const bool k_major = b.dim[0].inner == 1 && (g.in_tmem || a.dim[1].inner == 1);
  return k_major ? PM_OK : refuse(e, op, "8-bit operands of which K is not contiguous");
}

static pm_code check_op(pm_gen *e, pm_opid op) {
  switch (pm_get(e->g, op)->code) {
    case PM_OP_TCGEN05_MMA: return check_product(e, op);
    case PM_OP_COPY_S2T:
    case PM_OP_COPY_SCALES:
    case PM_OP_COPY_METADATA: return refuse(e, op, "copies to tensor memory");
    case PM_OP_GATHER_G2S:
    case PM_OP_SCATTER_S2G: return refuse(e, op, "copies of rows by number");
    case PM_OP_TRY_CANCEL:
      if (!pm_stands_in(e)) return refuse(e, op, "try_cluster_cancel without TMEM");
      return PM_OK;
    default: return PM_OK;
  }
}

pm_code pm_stand_in_check(pm_gen *e) {
  if (!e->options->stand_in) return PM_OK;
  for (pm_opid op = 1; op < e->g->ops.n; op++) PM_TRY(check_op(e, op));
  return PM_OK;
}

static bool takes_over(const pm_gen *e) {
  for (pm_opid op = 1; op < e->g->ops.n; op++) {
    if (pm_get(e->g, op)->code == PM_OP_TRY_CANCEL) return true;
  }
  return false;
}

/* Bits: f16, bf16; e4m3 by e4m3, e5m2 by e4m3, e4m3 by e5m2, e5m2 by e5m2 */
static uint32_t types_of(const pm_gen *e) {
  uint32_t found = 0;
  for (pm_opid op = 1; op < e->g->ops.n; op++) {
    if (pm_get(e->g, op)->code != PM_OP_TCGEN05_MMA) continue;
    const struct pm_mma *row = pm_tcgen05_of(e->g, op).row;
    if (pm_dtypes[row->a].bits == 16) found |= 1u << (row->a == PM_BF16);
    else found |= 4u << ((row->a == PM_E5M2) + 2 * (row->b == PM_E5M2));
  }
  return found;
}

void pm_stand_in_constants(const pm_gen *e, pm_text *out) {
  const pm_program *p = e->program;
  if (!pm_stands_in(e)) return;
  pm_putf(out, "constexpr unsigned program_lanes = %u; // the engine has those after them\n",
          p->block - PM_STAND_IN_LANES);
  pm_putf(out,
          "constexpr unsigned engine_bytes = %u; // of shared memory before 16 of the engine\n",
          e->tmem_slot);
  pm_put(out, "constexpr unsigned cluster_blocks[3] = {");
  for (int k = 0; k < 3; k++) pm_putf(out, "%u%s", p->cluster[k], k < 2 ? ", " : "};\n");
  pm_putf(out, "constexpr unsigned engine_types = 0x%x; // of products: bits, see tensor_wgmma\n",
          types_of(e));
  pm_putf(out, "constexpr bool takes_over = %s; // clusters take the places of others\n\n",
          takes_over(e) ? "true" : "false");
}

void pm_stand_in_begin(const pm_gen *e, pm_text *out) {
  if (!pm_stands_in(e)) return;
  pm_put(out, "  if (takes_over && !cluster_begins()) return;\n");
  pm_put(out, "  if (threadIdx.x >= program_lanes) {\n    tensor_engine();\n    return;\n  }\n");
}

const char *pm_stand_in_pair_copy(pm_gen *e, const char *fn, const pm_tensor_map *map) {
  if (!pm_stands_in(e) || e->options->entry_only) return fn;
  int64_t bits = pm_dtypes[map->dtype].bits;
  for (int d = 0; d < map->rank; d++) bits *= map->box[d];
  return pm_str(e, "%s<%lld>", fn, (long long)bits / 8);
}
