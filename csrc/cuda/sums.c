/* Sums of digits: sum over pieces of (number / div % size) * mul, as text and as a number. */
#include "gen.h"

const char *pm_sum_text(pm_gen *e, const pm_sum *s, const char *number, int64_t scale) {
  pm_text t;
  pm_text_init(&t, e->arena);
  for (uint32_t k = 0; k < s->n;) {
    pm_piece p = s->at[k++]; /* pieces stand least significant first */
    while (k < s->n && s->at[k].div == p.div * p.size && s->at[k].mul == p.mul * p.size) {
      p.size *= s->at[k++].size;
    }
    if (t.n) pm_put(&t, " + ");
    pm_put(&t, number);
    if (p.div > 1) pm_putf(&t, " / %lld", (long long)p.div);
    if (p.div * p.size < s->total) pm_putf(&t, " %% %lld", (long long)p.size);
    if (p.mul * scale != 1) pm_putf(&t, " * %lld", (long long)(p.mul * scale));
  }
  return t.n ? t.at : "0";
}

int64_t pm_sum_at(const pm_sum *s, int64_t number) {
  int64_t r = 0;
  for (uint32_t k = 0; k < s->n; k++) r += number / s->at[k].div % s->at[k].size * s->at[k].mul;
  return r;
}
