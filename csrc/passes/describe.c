/* What users call the layout of an array and the transforms of an SMEM ref. */
#include <stdio.h>

#include "passes.h"

/* (i, j) is in warp (i % 64) / 16, lane (i % 8) / 2 * 8 + j % 2 * 4 + j % 8 / 2, register
 * [i / 64][j / 8][i / 8 % 2][i % 2] */
static bool is_wgmma_transposed(const pm_layout *l) {
  int64_t index[PM_MAX_RANK];
  if (l->kind != PM_TILED || l->rank != 2) return false;
  const int64_t m = l->padded[0], n = l->padded[1], regs = pm_layout_regs(l);
  if (m % 64 || n % 8 || regs != m * n / 128) return false;
  for (int k = 0; k < 128 + regs; k++) {
    const int tid = k < 128 ? k : 0, lane = tid % 32;
    const int64_t r = k < 128 ? 0 : k - 128;
    pm_layout_index(l, tid, r, index);
    if (index[0] != r / (n / 2) * 64 + tid / 32 * 16 + r / 2 % 2 * 8 + lane / 8 * 2 + r % 2)
      return false;
    if (index[1] != r / 4 % (n / 8) * 8 + lane % 4 * 2 + lane / 4 % 2) return false;
  }
  return true;
}

static const char *describe_layout(const pm_graph *g, const pm_layout *l) {
  const char *text = pm_layout_text(g->arena, l);
  pm_text out;
  long long vec;
  if (!strcmp(text, "wgmma")) return "WGMMA";
  if (!strcmp(text, "wgmma.reduce(1)")) return "WGMMA_ROW";
  if (!strcmp(text, "wgmma.reduce(0)")) return "WGMMA_COL";
  if (is_wgmma_transposed(l)) return "WGMMA_TRANSPOSED";
  pm_text_init(&out, g->arena);
  if (!strcmp(text, "splat")) {
    pm_put(&out, "WG_SPLAT(");
    pm_put_dims(&out, l->shape, (uint32_t)l->rank);
  } else if (sscanf(text, "strided(%lld)", &vec) == 1) {
    pm_put(&out, "WG_STRIDED(");
    pm_put_dims(&out, l->shape, (uint32_t)l->rank);
    pm_putf(&out, ", %lld", vec);
  } else {
    return text;
  }
  pm_put(&out, ")");
  return out.at;
}

static const char *describe_transforms(const pm_graph *g, pm_val ref, int64_t packed) {
  const pm_opid alloc = pm_value_of(g, pm_view_base(g, ref))->def;
  uint32_t n;
  int64_t tiling[PM_MAX_RANK];
  const int64_t *tile = pm_attr_list(g, alloc, PM_ATTR_TILING, &n);
  for (uint32_t k = 0; k < n; k++) tiling[k] = k + 1 < n || !packed ? tile[k] : tile[k] * packed;
  if (*pm_attr(g, alloc, PM_ATTR_GIVEN) == 2) n = 0;
  const long long swizzle = *pm_attr(g, alloc, PM_ATTR_SWIZZLE);
  pm_text out;
  pm_text_init(&out, g->arena);
  pm_put(&out, "(");
  if (n) {
    pm_put(&out, "TilingTransform(tiling=");
    pm_put_dims(&out, tiling, n);
    pm_put(&out, ")");
  }
  if (swizzle) pm_putf(&out, "%sSwizzleTransform(swizzle=%lld)", n ? ", " : "", swizzle);
  pm_put(&out, !n != !swizzle ? ",)" : ")");
  return out.at;
}

const char *pm_describe(const pm_graph *g, pm_val v, int64_t packed) {
  const pm_type *t = pm_typeof(g, v);
  if (t->kind == PM_REF) return describe_transforms(g, v, packed);
  if (!t->rank) return "WG_SPLAT(())";
  return describe_layout(g, pm_value_layout(g, v));
}

const char *pm_print_layout_text(const pm_graph *g, pm_opid op) {
  const char *s = g->strings.at[*pm_attr(g, op, PM_ATTR_FORMAT)];
  bool done = false;
  pm_text out;
  pm_text_init(&out, g->arena);
  pm_put(&out, "");
  for (; *s; s++) {
    if (s[0] == '{' && s[1] == '}' && !done) {
      pm_put(&out, pm_describe(g, pm_in(g, op, 0), *pm_attr(g, op, PM_ATTR_PACKED)));
      done = true;
      s++;
    } else {
      pm_putn(&out, s, 1);
      if ((s[0] == '{' || s[0] == '}') && s[1] == s[0]) s++;
    }
  }
  return out.at;
}
