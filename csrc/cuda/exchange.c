/* Exchange of elements between the lanes of a thread, through its scratch or by shuffles.
 *
 * Through scratch: the operands are stored row-major, the lanes synchronise, the result is loaded
 * through a view that says where its elements are, and the lanes synchronise again. So scratch is
 * free whenever an op starts. */
#include "gen.h"

pm_view pm_scratch_view(const pm_type *t) {
  pm_view v = {.param = -1, .space = PM_SMEM, .dtype = t->dtype, .rank = t->rank};
  int64_t stride = 1;
  for (int k = t->rank - 1; k >= 0; k--) {
    v.dim[k] = (pm_view_dim){.size = t->dim[k], .inner = stride, .base_dim = -1};
    stride *= t->dim[k];
  }
  return v;
}

pm_code pm_no_registers(pm_gen *e, pm_opid op) {
  return pm_gen_fail(e, op, PM_E_INTERNAL, "the registers of layout %s are not those of %s",
                     pm_layout_text(e->arena, pm_layout_in(e, pm_in(e->g, op, 0))),
                     pm_layout_text(e->arena, pm_layout_in(e, pm_get(e->g, op)->out)));
}

pm_code pm_need_scratch(pm_gen *e, pm_opid op, int64_t bytes) {
  if (bytes <= pm_scratch_bytes(e)) return PM_OK;
  return pm_gen_fail(e, op, PM_E_INTERNAL, "it needs %lld bytes of scratch and has %lld",
                     (long long)bytes, (long long)pm_scratch_bytes(e));
}

int64_t pm_scratch_size(const pm_gen *e, pm_val v) {
  const pm_type *t = pm_typeof(e->g, v);
  return pm_type_size(t) * pm_dtypes[t->dtype].bytes;
}

void pm_put_array(pm_gen *e, pm_val v, const pm_view *view) {
  pm_at(e, v, "0");
  if (pm_is_array(e, v)) pm_store_array(e, pm_layout_in(e, v), view, e->slot[v].text, false);
  else pm_store_splat(e, view, pm_at(e, v, "0"));
}

void pm_take_result(pm_gen *e, pm_opid op, const pm_view *view) {
  const pm_val out = pm_get(e->g, op)->out;
  pm_line(e, PM_WARPGROUP_SYNC);
  const char *name = pm_declare(e, out, out);
  if (pm_is_array(e, out)) {
    pm_load_array(e, pm_layout_in(e, out), view, name, false);
  } else {
    pm_line(e, "ld_shared<%s, 1>(&%s, %s);", pm_cpp_type(view->dtype), name,
            pm_view_address(e, view));
  }
  pm_line(e, PM_WARPGROUP_SYNC);
}

pm_code pm_through(pm_gen *e, pm_opid op, const pm_view *all, const pm_view *result) {
  const pm_view_dim *first = &all->dim[0];
  PM_TRY(pm_need_scratch(e, op, first->size * first->inner * pm_dtypes[all->dtype].bytes));
  pm_note(e, op, pm_str(e, "%s, through shared memory", pm_ops[pm_get(e->g, op)->code].text));
  pm_put_array(e, pm_in(e->g, op, 0), all);
  pm_take_result(e, op, result);
  return PM_OK;
}

pm_code pm_through_scratch(pm_gen *e, pm_opid op, const pm_view *result) {
  const pm_val in = pm_in(e->g, op, 0);
  const pm_view all = pm_scratch_view(pm_typeof(e->g, in));
  return pm_through(e, op, &all, result);
}

/* ---- shuffles ------------------------------------------------------------------------------ */

/* "(lane >> 1 & 1) << 2 | ..": the lane to read */
static const char *source_lane(pm_gen *e, const pm_relayout *plan) {
  pm_text t;
  pm_text_init(&t, e->arena);
  for (int k = 0; k < 5; k++) {
    const int from = plan->place[k];
    pm_putf(&t, "%s(lane >> %d & 1) << %d", k ? " | " : "", from, k);
  }
  return t.at;
}

/* Words of four bytes each, `index` (of a byte) counted from word `first`: "w[k + 1]" */
static const char *word_text(pm_gen *e, const char *k, int64_t byte) {
  if (!strcmp(k, "0")) return pm_str(e, "w[%lld]", (long long)(byte / 4));
  return byte < 4 ? pm_str(e, "w[%s]", k) : pm_str(e, "w[%s + %lld]", k, (long long)(byte / 4));
}

/* Bytes 0 to n - 1 of a word, n of them those of registers map[0], map[1] ..., from two words. */
static const char *pick_two(pm_gen *e, const char *k, const int32_t *map, int n) {
  int32_t words[2] = {-1, -1};
  unsigned selector = 0;
  for (int i = 0; i < n; i++) {
    const int32_t from = map[i] < 0 ? 0 : map[i];
    int at = 0;
    while (at < 2 && words[at] >= 0 && words[at] != from / 4) at++;
    if (at == 2) return NULL;
    words[at] = from / 4;
    selector |= (unsigned)(at * 4 + from % 4) << (4 * i);
  }
  if (n == 4 && selector == 0x3210) return word_text(e, k, 4 * (int64_t)words[0]);
  return pm_str(e, "pick_bytes(%s, %s, 0x%04x)", word_text(e, k, 4 * (int64_t)words[0]),
                words[1] < 0 ? "0" : word_text(e, k, 4 * (int64_t)words[1]), selector);
}

static const char *pick_word(pm_gen *e, const char *k, const int32_t *map) {
  const char *whole = pick_two(e, k, map, 4);
  if (whole) return whole;
  return pm_str(e, "pick_bytes(%s, %s, 0x5410)", pick_two(e, k, map, 2),
                pick_two(e, k, map + 2, 2));
}

/* Every so many words the map of bytes repeats. */
static int64_t map_period(const int32_t *map, int64_t n) {
  for (int64_t p = 4; p < n; p += 4) {
    bool same = n % p == 0;
    for (int64_t r = p; r < n && same; r++) same = map[r] == map[r - p] + p;
    for (int64_t r = 0; r < p && same; r++) same = map[r] >= 0;
    if (same) return p / 4;
  }
  return n / 4;
}

/* Do four bytes stay in a word all the way? */
static bool moves_words(const pm_relayout *plan) {
  if (plan->n_regs % 8 || plan->permutes) return false;
  for (uint32_t k = 0; k < plan->n_swaps; k++) {
    if (plan->swap[k].step > 2 && plan->swap[k].step % 4) return false;
  }
  return true;
}

static pm_code bytes_by_shuffles(pm_gen *e, pm_opid op, const pm_relayout *plan) {
  const pm_val in = pm_in(e->g, op, 0), out = pm_get(e->g, op)->out;
  const char *type = pm_cpp_type(pm_typeof(e->g, in)->dtype);
  const long long n = plan->n_regs, words = n / 4;
  const char *name = pm_declare(e, out, out);
  pm_begin(e, "{");
  pm_line(e, "u32 w[%lld], moved[%lld];", words, words);
  pm_line(e, "pack<%s, %lld>(w, %s);", type, n, e->slot[in].text);
  for (uint32_t k = 0; k < plan->n_swaps; k++) {
    const int mask = 1 << plan->swap[k].lane_bit;
    const long long step = plan->swap[k].step, apart = step / 4;
    pm_unroll(e, n);
    if (apart) {
      pm_begin(e, "for (int k = 0; k < %lld; k++) {", words);
      pm_line(e, "if (k %% %lld < %lld) swap_lanes<1, 1>(&w[k], &w[k + %lld], lane & %d, %d);",
              2 * apart, apart, apart, mask, mask);
    } else {
      pm_begin(e, "for (int k = 0; k < %lld; k += 2) {", words);
      pm_line(e, "swap_bytes<%lld>(&w[k], &w[k + 1], lane & %d, %d);", step, mask, mask);
    }
    pm_end(e);
  }
  const int64_t period = map_period(plan->map, n);
  const char *k = pm_begin_unrolled(e, "k", words, period);
  for (int64_t j = 0; j < period; j++) {
    const char *to = j ? pm_str(e, "%s + %lld", k, (long long)j) : k;
    pm_line(e, "moved[%s] = %s;", to, pick_word(e, k, plan->map + 4 * j));
  }
  pm_end_unrolled(e, words, period);
  pm_line(e, "unpack<%s, %lld>(%s, moved);", type, n, name);
  pm_end(e);
  return PM_OK;
}

pm_code pm_by_shuffles(pm_gen *e, pm_opid op, const pm_relayout *plan) {
  const pm_val in = pm_in(e->g, op, 0), out = pm_get(e->g, op)->out;
  const pm_dtype d = pm_typeof(e->g, in)->dtype;
  const int64_t n_regs = plan->n_regs, bytes = pm_dtypes[d].bytes;
  int64_t n, apart;
  pm_note(e, op, "layout_cast, by shuffles");
  if (bytes == 1 && moves_words(plan)) return bytes_by_shuffles(e, op, plan);
  const char *name = pm_declare(e, out, out), *moved = pm_unique(e, "moved");
  pm_begin(e, "{");
  pm_line(e, "%s %s[%lld];", pm_cpp_type(d), moved, (long long)n_regs);
  const char *r = pm_begin_unrolled(e, "r", n_regs, 1);
  pm_line(e, "%s[%s] = %s;", moved, r, pm_at(e, in, r));
  pm_end_unrolled(e, n_regs, 1);
  for (uint32_t k = 0; k < plan->n_swaps; k++) {
    const int bit = plan->swap[k].lane_bit;
    const long long step = plan->swap[k].step;
    pm_relayout_words(plan, step, bytes, &n, &apart);
    const long long by = apart == 1 ? n : 1, group = apart == 1 ? 1 : n;
    pm_unroll(e, n_regs);
    pm_begin(e, "for (int r = 0; r < %lld; r += %lld) {", (long long)n_regs, by);
    pm_line(e,
            "if (r %% %lld < %lld) swap_lanes<%lld, %lld>(&%s[r], &%s[r + %lld], lane & %d, %d);",
            2 * step * group, step, (long long)n, (long long)apart, moved, moved, step, 1 << bit,
            1 << bit);
    pm_end(e);
  }
  if (plan->permutes) {
    pm_relayout_words(plan, 0, bytes, &n, &apart);
    pm_line(e, "const u32 from = %s;", source_lane(e, plan));
    pm_unroll(e, n_regs);
    pm_line(e, "for (int r = 0; r < %lld; r += %lld) shuffle_from<%lld>(&%s[r], from);",
            (long long)n_regs, (long long)n, (long long)n, moved);
  }
  const char *map = pm_map_text(e, pm_layout_in(e, out), plan->map, n_regs);
  r = pm_begin_unrolled(e, "r", n_regs, 1);
  pm_line(e, "%s[%s] = %s[%s];", name, r, moved, n_regs > 1 ? map : "0");
  pm_end_unrolled(e, n_regs, 1);
  pm_end(e);
  return PM_OK;
}
