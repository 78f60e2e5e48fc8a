/* Plans for conversions by shuffles. Digits are split into atoms: bits, and the odd factor of a
 * digit, which must be the same in both layouts. An atom is identified by the index bits that it
 * moves. */
#include "relayout.h"

typedef struct atom {
  int dim;
  int64_t size, stride; /* of the index */
  int64_t div;          /* of the number it is a digit of */
} atom;

enum { MAX_ATOMS = 64, LANE_BITS = 5 };

/* Least significant first; -1: too many. */
static int cut(const pm_digit *d, uint32_t n, atom *out) {
  int count = 0;
  int64_t div = 1;
  for (uint32_t k = n; k-- > 0; div *= d[k].size) {
    int64_t left = d[k].size, stride = d[k].stride, at = div;
    while (left > 1) {
      const int64_t size = left % 2 ? left : 2;
      if (count == MAX_ATOMS) return -1;
      out[count++] = (atom){d[k].dim, size, stride, at};
      left /= size;
      stride *= size;
      at *= size;
    }
  }
  return count;
}

static bool same(const atom *a, const atom *b) {
  return a->dim == b->dim && a->size == b->size && a->stride == b->stride;
}

static int find(const atom *list, int n, const atom *a) {
  for (int k = 0; k < n; k++) {
    if (same(&list[k], a)) return k;
  }
  return -1;
}

static bool any_copies(const atom *list, int n) {
  for (int k = 0; k < n; k++) {
    if (list[k].dim < 0) return true;
  }
  return false;
}

/* A wanted atom that is in registers: `first` if that is one, else any. -1: none */
static int pick(const atom *want, const atom *reg, int n_reg, int first) {
  const int at = find(reg, n_reg, &want[first]);
  for (int k = 0; k < LANE_BITS && at < 0; k++) {
    const int other = find(reg, n_reg, &want[k]);
    if (other >= 0) return other;
  }
  return at;
}

bool pm_relayout_plan(pm_arena *a, const pm_layout *from, const pm_layout *to, pm_relayout *out) {
  atom warp[2][MAX_ATOMS], lane[2][MAX_ATOMS], reg[2][MAX_ATOMS];
  const pm_layout *both[] = {from, to};
  int n_warp[2], n_lane[2], n_reg[2];
  memset(out, 0, sizeof *out);
  if (from->kind != PM_TILED || to->kind != PM_TILED || from->rank != to->rank) return false;
  if (memcmp(from->padded, to->padded, sizeof from->padded[0] * from->rank)) return false;
  for (int k = 0; k < 2; k++) {
    n_warp[k] = cut(both[k]->warp, both[k]->n_warp, warp[k]);
    n_lane[k] = cut(both[k]->lane, both[k]->n_lane, lane[k]);
    n_reg[k] = cut(both[k]->reg, both[k]->n_reg, reg[k]);
    if (n_lane[k] != LANE_BITS || n_reg[k] < 0 || any_copies(lane[k], LANE_BITS)) return false;
  }
  if (n_warp[0] != n_warp[1] || n_reg[0] != n_reg[1]) return false;
  for (int k = 0; k < n_warp[0]; k++) {
    if (!same(&warp[0][k], &warp[1][k])) return false;
  }
  atom *now = lane[0], *want = lane[1];
  for (int p = 0; p < LANE_BITS; p++) {
    if (find(want, LANE_BITS, &now[p]) >= 0) continue;
    const int r = pick(want, reg[0], n_reg[0], p);
    if (r < 0) return false;
    const atom leaves = now[p];
    now[p] = reg[0][r];
    out->swap[out->n_swaps].lane_bit = p;
    out->swap[out->n_swaps++].step = reg[0][r].div;
    reg[0][r] = (atom){leaves.dim, leaves.size, leaves.stride, reg[0][r].div};
  }
  for (int p = 0; p < LANE_BITS; p++) {
    const int q = find(want, LANE_BITS, &now[p]);
    if (q < 0) return false;
    out->place[p] = (uint8_t)q;
    out->permutes |= q != p;
  }
  out->n_regs = pm_layout_regs(to);
  out->map = PM_NEW(a, int32_t, out->n_regs);
  for (int k = 0; k < n_reg[1]; k++) {
    const int at = find(reg[0], n_reg[0], &reg[1][k]);
    if (at < 0) return false;
    for (int64_t r = 0; r < out->n_regs; r++) {
      out->map[r] += (int32_t)(r / reg[1][k].div % reg[1][k].size * reg[0][at].div);
    }
  }
  return true;
}

void pm_relayout_words(const pm_relayout *r, int64_t step, int64_t bytes, int64_t *n,
                       int64_t *apart) {
  *n = bytes < 4 ? 4 / bytes : 1;
  *apart = 1;
  if (*n == 1 || step % *n == 0) return;
  if (step > 0 && r->n_regs % (2 * step * *n) == 0) *apart = 2 * step;
  else if (step > 0 || r->n_regs % *n) *n = 1;
}

int64_t pm_relayout_shuffles(const pm_relayout *r, int64_t bytes) {
  int64_t total = 0, n, apart;
  for (uint32_t k = 0; k < r->n_swaps; k++) {
    pm_relayout_words(r, r->swap[k].step, bytes, &n, &apart);
    total += r->n_regs / 2 / n;
  }
  pm_relayout_words(r, 0, bytes, &n, &apart);
  if (r->n_regs % n) n = 1;
  return total + (r->permutes ? r->n_regs / n : 0);
}

/* A store and a load of shared memory, and two barriers, are worth two shuffles. */
bool pm_relayout_pays(const pm_relayout *r, int64_t bytes) {
  return pm_relayout_shuffles(r, bytes) <= 2 * pm_cdiv(r->n_regs * bytes, 4);
}
