/* Device functions of copies that combine what they bring with what is in global memory: one for
 * each operation that a program uses. An engine does each element at once; lanes use atomics. */
#include "gen.h"

/* "add", "min" ...: without the sign, which the type says */
static const char *op_text(int64_t combine) {
  const char *text = pm_enum_text(PM_FAMILY_COMBINE, combine);
  const bool signs = combine >= PM_COMBINE_UMIN && combine <= PM_COMBINE_SMAX;
  return signs ? text + 1 : text;
}

const char *pm_tma_combine(pm_gen *e, int64_t combine, int rank) {
  const char *op = op_text(combine);
  const char *name = pm_str(e, "tma_%s_%dd", op, rank);
  pm_text t;
  pm_text_init(&t, e->arena);
  pm_putf(&t, "// a box is combined with the tensor: %s\n", op);
  pm_putf(&t, "FN void %s(const TensorMap* m, u32 src", name);
  for (int k = 0; k < rank; k++) pm_putf(&t, ", i32 c%d", k);
  pm_putf(&t,
          ") {\n  asm volatile(\"cp.reduce.async.bulk.tensor.%dd.global.shared::cta.%s.tile"
          ".bulk_group [%%0, {",
          rank, op);
  for (int k = 0; k < rank; k++) pm_putf(&t, "%s%%%d", k ? "," : "", k + 2);
  pm_put(&t, "}], [%1];\"\n               :: \"l\"(m), \"r\"(src)");
  for (int k = 0; k < rank; k++) pm_putf(&t, ", \"r\"(c%d)", k);
  pm_put(&t, " : \"memory\");\n}\n");
  return pm_family(e, name, t.at);
}

/* As cp.reduce.async.bulk calls the type of the elements. */
static const char *type_text(int64_t combine, pm_dtype as) {
  const bool bits = combine >= PM_COMBINE_AND;
  return bits ? "b32" : pm_dtypes[as].short_name;
}

const char *pm_bulk_combine(pm_gen *e, int64_t combine, pm_dtype d) {
  const char *op = op_text(combine);
  pm_dtype as;
  pm_combine_atomic(combine, d, &as);
  const char *name = pm_str(e, "bulk_%s_%s", op, pm_cpp_type(as));
  const bool half = pm_dtypes[as].bits == 16;
  pm_text t;
  pm_text_init(&t, e->arena);
  pm_putf(&t, "// contiguous elements are combined with what is there: %s\n", op);
  pm_putf(&t, "FN void %s(void* dst, u32 src, u32 bytes) {\n", name);
  pm_putf(&t,
          "  asm volatile(\"cp.reduce.async.bulk.global.shared::cta.bulk_group.%s%s.%s"
          " [%%0], [%%1], %%2;\"\n",
          op, half && combine == PM_COMBINE_ADD ? ".noftz" : "", type_text(combine, as));
  pm_put(&t, "               :: \"l\"(dst), \"r\"(src), \"r\"(bytes) : \"memory\");\n}\n");
  return pm_family(e, name, t.at);
}

/* *type: that of the elements */
const char *pm_lane_combine(pm_gen *e, int64_t combine, pm_dtype d, const char **type) {
  const char *op = op_text(combine);
  pm_dtype as;
  const int kind = pm_combine_atomic(combine, d, &as);
  *type = pm_cpp_type(as);
  if (kind >= 0) return pm_family_atomic(e, kind, as, "global", false);
  const char *name = pm_str(e, "red_%s_u32_global", op);
  return pm_family(
      e, name,
      pm_str(e,
             "// %s\nFN void %s(u32* a, u32 x) {\n"
             "  asm volatile(\"red.relaxed.gpu.global.%s.u32 [%%0], %%1;\"\n"
             "               :: \"l\"(a), \"r\"(x) : \"memory\");\n}\n",
             combine == PM_COMBINE_INC ? "plus one, and zero behind x"
                                       : "less one, and x behind zero or where it is above x",
             name, op));
}

const char *pm_async_combine(pm_gen *e, int64_t combine, pm_dtype d) {
  const char *op = op_text(combine), *type = pm_cpp_type(d);
  const char *as = combine >= PM_COMBINE_AND ? "b32" : pm_dtypes[d].short_name;
  const char *name = pm_str(e, "red_async_%s_%s", op, type);
  return pm_family(
      e, name,
      pm_str(e,
             "// one element in a block of the cluster, as 4 bytes for the barrier there\n"
             "FN void %s(u32 a, %s x, u32 b) {\n"
             "  asm volatile(\"red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx"
             "::bytes.%s.%s [%%0], %%1, [%%2];\"\n"
             "               :: \"r\"(a), \"r\"(x), \"r\"(b) : \"memory\");\n}\n",
             name, type, op, as));
}
