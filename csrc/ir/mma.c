/* The table of products, and what operands look like in registers. */
#include "mma.h"

const pm_mma pm_mmas[] = {
#define N(feature) | PM_HAS_##feature
#define S(dtype, elements) .scale = PM_##dtype, .block = elements,
#define PM_MMA(code, a_, b_, acc_, types_, step, columns, most, in_acc, in_a, in_b, majors_, \
               scales, need)                                                                 \
  {.op = PM_OP_##code,                                                                       \
   .a = PM_##a_,                                                                             \
   .b = PM_##b_,                                                                             \
   .acc = PM_##acc_,                                                                         \
   .types = types_,                                                                          \
   .k = step,                                                                                \
   .n = columns,                                                                             \
   .most_n = most,                                                                           \
   .in = {PM_LAYOUT_##in_acc, PM_LAYOUT_##in_a, PM_LAYOUT_##in_b},                           \
   .majors = PM_MAJORS_##majors_,                                                            \
   scales.needs = 0 need},
#include "mma.def"
#undef PM_MMA
#undef S
#undef N
};
const uint32_t pm_mma_count = PM_COUNT(pm_mmas);

const pm_mma *pm_mma_find_scaled(pm_opcode op, pm_dtype a, pm_dtype b, pm_dtype acc, pm_dtype scale,
                                 int64_t block) {
  for (uint32_t k = 0; k < pm_mma_count; k++) {
    const pm_mma *m = &pm_mmas[k];
    if (m->op != op || m->a != a || m->b != b || m->acc != acc || m->block != block) continue;
    if (!block || m->scale == scale) return m;
  }
  return NULL;
}

const pm_mma *pm_mma_find(pm_opcode op, pm_dtype a, pm_dtype b, pm_dtype acc) {
  return pm_mma_find_scaled(op, a, b, acc, PM_BOOL, 0);
}

static const pm_mma *of_dtypes(const pm_graph *g, pm_opid op, pm_opcode code) {
  const pm_type *acc = pm_typeof(g, pm_in(g, op, 0)), *a = pm_typeof(g, pm_in(g, op, 1)),
                *b = pm_typeof(g, pm_in(g, op, 2));
  return pm_mma_find(code, (pm_dtype)a->dtype, (pm_dtype)b->dtype, (pm_dtype)acc->dtype);
}

/* One scale is for twice as many elements of a product whose a is sparse. */
static const pm_mma *of_tcgen05(const pm_graph *g, pm_opid op) {
  const pm_op *o = pm_get(g, op);
  if (o->n_in < 6) return of_dtypes(g, op, PM_OP_TCGEN05_MMA);
  const pm_type *acc = pm_typeof(g, pm_in(g, op, 0)), *a = pm_typeof(g, pm_in(g, op, 1)),
                *b = pm_typeof(g, pm_in(g, op, 2)), *scale = pm_typeof(g, pm_in(g, op, 4));
  const int64_t packed = *pm_attr(g, op, PM_ATTR_PACKED);
  const bool in_bytes = packed && a->space == PM_SMEM;
  return pm_mma_find_scaled(PM_OP_TCGEN05_MMA, packed ? PM_E2M1 : (pm_dtype)a->dtype,
                            packed ? PM_E2M1 : (pm_dtype)b->dtype, (pm_dtype)acc->dtype,
                            (pm_dtype)scale->dtype,
                            a->dim[1] * (in_bytes ? packed : 1) / scale->dim[1]);
}

const pm_mma *pm_mma_of(const pm_graph *g, pm_opid op) {
  const pm_opcode code = (pm_opcode)pm_get(g, op)->code;
  if (code == PM_OP_TCGEN05_MMA) return of_tcgen05(g, op);
  return code == PM_OP_WGMMA || code == PM_OP_MMA ? of_dtypes(g, op, code) : NULL;
}

bool pm_has_mma(const pm_graph *g, pm_opid wgmma) { return of_dtypes(g, wgmma, PM_OP_MMA); }

pm_layid pm_mma_layout(pm_graph *g, const pm_mma *m, uint32_t k, const pm_type *array) {
  if (m->in[k] == PM_LAYOUT_NONE) return 0;
  const int64_t bits = pm_dtypes[array->dtype].bits;
  const pm_layout_name_id id = (pm_layout_name_id)m->in[k];
  const pm_layid l = pm_layout_constant(g, id, NULL, 0, array);
  return l ? l : pm_layout_constant(g, id, &bits, 1, array);
}
