/* What type rules look at: for typing.c, types.c, types_devices.c and tcgen05.c alone, hence the
 * short names. */
#ifndef PM_TYPING_H
#define PM_TYPING_H

#include <inttypes.h>

#include "rules.h"

static inline bool same_shape(const pm_type *a, const pm_type *b) {
  return a->rank == b->rank && !memcmp(a->dim, b->dim, sizeof(int64_t) * a->rank);
}

static inline const char *name(const pm_typing *t) { return pm_op_name(t->code); }
static inline const pm_type *type_in(const pm_typing *t, uint32_t k) {
  return pm_typeof(t->g, t->in[k]);
}
static inline const char *show(const pm_typing *t, const pm_type *type) {
  return pm_type_text(t->g->arena, type);
}
static inline const char *show_in(const pm_typing *t, uint32_t k) { return show(t, type_in(t, k)); }

static inline const char *show_shape(const pm_typing *t, const pm_type *type) {
  pm_text out;
  pm_text_init(&out, t->g->arena);
  pm_put(&out, "(");
  for (int k = 0; k < type->rank; k++) pm_putf(&out, "%s%" PRId64, k ? ", " : "", type->dim[k]);
  pm_put(&out, type->rank == 1 ? ",)" : ")");
  return out.at;
}

static inline int64_t word(const pm_typing *t, pm_attr_id id) {
  const pm_op_info *info = &pm_ops[t->code];
  for (int k = 0; k < info->n_attrs; k++) {
    if (info->attrs[k] == id) return t->attr[k];
  }
  return 0;
}

static inline const int64_t *list_of(const pm_typing *t, pm_attr_id id, uint32_t *n) {
  const int64_t *list = &t->g->lists.at[word(t, id)];
  *n = (uint32_t)list[0];
  return list + 1;
}

#define FAIL(code, ...) return pm_fail(t->err, PM_E_##code, __VA_ARGS__)

static inline pm_code need_given(const pm_typing *t, pm_kind kind) {
  if (!t->given) FAIL(INTERNAL, "%s: the type of its result must be given", name(t));
  if (t->given->kind != kind) FAIL(INTERNAL, "%s: the given type is of the wrong kind", name(t));
  return pm_type_check(t->g, t->given, name(t), t->err);
}

static inline pm_code given(const pm_typing *t, pm_kind kind, pm_type *out) {
  const pm_code rc = need_given(t, kind);
  if (!rc) *out = *t->given;
  return rc;
}

/* ---- in typing.c -------------------------------------------------------------------------- */

/* Asynchronous engines reach the SMEM of their own block only. */
pm_code pm_own_block(const pm_typing *t, uint32_t k, const char *operand);
pm_code pm_single_barrier(const pm_typing *t, uint32_t k);
bool pm_is_cluster_barrier(const pm_graph *g, pm_val barrier);
/* Does barrier k order tensor cores, or not, as the op needs it? */
pm_code pm_flavour(const pm_typing *t, uint32_t k, bool tensor_core);
/* ValueError if operand k is the memory of all devices at once. */
pm_code pm_one_device(const pm_typing *t, uint32_t k, const char *operand);
/* "float16, bfloat16 ...": the operands that the product takes */
const char *pm_operand_dtypes(const pm_typing *t);

pm_code pm_type_load(const pm_typing *t, pm_type *out);
pm_code pm_type_store(const pm_typing *t, pm_type *out);

/* ---- in types_devices.c ------------------------------------------------------------------- */

pm_code pm_type_device_ref(const pm_typing *t, pm_type *out);
pm_code pm_type_multicast_ref(const pm_typing *t, pm_type *out);
pm_code pm_type_semaphore_of(const pm_typing *t, pm_type *out);
pm_code pm_type_multimem_store(const pm_typing *t, pm_type *out);
pm_code pm_type_multimem_reduce(const pm_typing *t, pm_type *out);

/* ---- in tcgen05.c ------------------------------------------------------------------------- */

pm_code pm_type_gather_rows(const pm_typing *t, pm_type *out);
pm_code pm_type_scatter_rows(const pm_typing *t, pm_type *out);
pm_code pm_type_try_cancel(const pm_typing *t, pm_type *out);
pm_code pm_type_query_cancel(const pm_typing *t, pm_type *out);
pm_code pm_type_alloc_tmem(const pm_typing *t, pm_type *out);
pm_code pm_type_tcgen05_mma(const pm_typing *t, pm_type *out);
pm_code pm_type_tcgen05_commit(const pm_typing *t, pm_type *out);
pm_code pm_type_copy_tmem(const pm_typing *t, pm_type *out);
pm_code pm_type_copy_scales(const pm_typing *t, pm_type *out);
pm_code pm_type_copy_metadata(const pm_typing *t, pm_type *out);
pm_code pm_type_load_tmem(const pm_typing *t, pm_type *out);
pm_code pm_type_tmem_reduced(const pm_typing *t, pm_type *out);
pm_code pm_type_store_tmem(const pm_typing *t, pm_type *out);
/* May an INDEX of a ref in TMEM be made? Called with dimensions in range. */
pm_code pm_type_tmem_index(const pm_typing *t);

#endif
