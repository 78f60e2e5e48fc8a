/* mma: tensor-core products with all operands in registers, one instruction for each block of 16
 * rows of a warp, 8 columns and 32 bytes along K.
 *
 * In the layouts WGMMA (acc and result), MMA_LHS (a) and MMA_RHS (b), the registers of one
 * instruction are adjacent: four of the accumulator, four words of a, two of b. The outer loop runs
 * over the steps along K, so that consecutive instructions do not wait for each other. */
#include "gen.h"

/* The operand as words, in a variable `name`. */
static void put_words(pm_gen *e, const char *name, pm_val v) {
  const pm_type *t = pm_typeof(e->g, v);
  const char *type = pm_cpp_type(t->dtype), *x = pm_at(e, v, "0");
  const bool halves = pm_dtypes[t->dtype].bits < 8; /* of a byte */
  const long long n = pm_layout_regs(pm_value_layout(e->g, v)),
                  of_word = 32 / pm_dtypes[t->dtype].bits;
  pm_line(e, "u32 %s[%lld];", name, n / of_word);
  if (!pm_is_array(e, v)) {
    pm_begin(e, "{");
    pm_line(e, "%s x[%lld];", type, of_word);
    pm_line(e, "for (int k = 0; k < %lld; k++) x[k] = %s;", of_word, x);
    pm_line(e, "for (int r = 0; r < %lld; r++) %s(&%s[r], x);", n / of_word,
            halves ? "pack_nibbles" : pm_str(e, "pack<%s, %lld>", type, of_word), name);
    pm_end(e);
  } else if (halves) {
    pm_unroll(e, n);
    pm_line(e, "for (int r = 0; r < %lld; r++) pack_nibbles(&%s[r], &%s[r * 8]);", n / of_word,
            name, e->slot[v].text);
  } else {
    pm_line(e, "pack<%s, %lld>(%s, %s);", type, n, name, e->slot[v].text);
  }
}

pm_code pm_cuda_MMA(pm_gen *e, pm_opid op) {
  const pm_val acc = pm_in(e->g, op, 0), a = pm_in(e->g, op, 1), b = pm_in(e->g, op, 2);
  const pm_val out = pm_get(e->g, op)->out;
  const pm_type *t = pm_typeof(e->g, a);
  const int64_t m_steps = t->dim[0] / 64, n_steps = pm_typeof(e->g, out)->dim[1] / 8;
  const pm_mma *mma = pm_mma_of(e->g, op);
  const int64_t k_steps = t->dim[1] / mma->k;
  const char *fn = pm_ptx_mma(e, mma);
  PM_TRY(pm_check_layout(e, op, out, 0));
  pm_at(e, acc, "0");
  pm_at(e, a, "0");
  pm_at(e, b, "0");
  pm_note(e, op, "mma");
  const char *d = pm_declare(e, out, out);
  pm_assign(e, out, acc);
  pm_begin(e, "{");
  put_words(e, "a", a);
  put_words(e, "b", b);
  const char *k = pm_begin_unrolled(e, "k", k_steps, 1), *m = pm_begin_unrolled(e, "m", m_steps, 1);
  const char *n = pm_begin_unrolled(e, "n", n_steps, 1);
  pm_line(e, "%s(&%s[(%s * %lld + %s) * 4], &a[(%s * %lld + %s) * 4], &b[(%s * %lld + %s) * 2]);",
          fn, d, m, (long long)n_steps, n, m, (long long)k_steps, k, k, (long long)n_steps, n);
  pm_end_unrolled(e, n_steps, 1);
  pm_end_unrolled(e, m_steps, 1);
  pm_end_unrolled(e, k_steps, 1);
  pm_end(e);
  return PM_OK;
}
