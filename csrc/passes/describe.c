/* What users call the layout of an array and the transforms of an SMEM ref. */
#include "../ir/tmem.h"
#include "passes.h"

/* "WGMMA", "WGMMA_ROW", "MMA_LHS(16)": a layout of layouts.def as Python names it. TMEM_NATIVE
 * without its vector, if that is the default. */
static const char *member(const pm_graph *g, const pm_layout *l, const pm_layout_identity *x) {
  const bool plain = x->id == PM_LAYOUT_TCGEN05_TMEM_NATIVE && x->arg[0] == 2;
  const char *text = pm_layout_name(g->arena, l);
  const size_t n = strcspn(text, "(."), arguments = text[n] == '(' ? strcspn(text + n, ")") + 1 : 0;
  pm_text out;
  pm_text_init(&out, g->arena);
  for (size_t k = 0; k < n; k++) {
    const char c = text[k] >= 'a' && text[k] <= 'z' ? (char)(text[k] - 'a' + 'A') : text[k];
    pm_putn(&out, &c, 1);
  }
  if (!plain) pm_putn(&out, text + n, arguments);
  if (x->axis >= 0 && (plain || !arguments)) pm_put(&out, x->axis ? "_ROW" : "_COL");
  else pm_put(&out, text + n + arguments);
  return out.at;
}

static const char *describe_layout(const pm_graph *g, const pm_layout *l) {
  pm_layout_identity x;
  pm_text out;
  if (l->kind == PM_TILED && pm_layout_identify(g->arena, l, &x)) return member(g, l, &x);
  if (l->kind == PM_TILED || (l->kind == PM_FLAT && !pm_layout_is_strided(l))) {
    return pm_layout_text(g->arena, l);
  }
  pm_text_init(&out, g->arena);
  pm_put(&out, l->kind == PM_SPLAT ? "WG_SPLAT(" : "WG_STRIDED(");
  pm_put_dims(&out, l->shape, (uint32_t)l->rank);
  if (l->kind == PM_FLAT) pm_putf(&out, ", %lld", (long long)pm_layout_vector(l, 0));
  pm_put(&out, ")");
  return out.at;
}

static const char *describe_transforms(const pm_graph *g, pm_val ref, int64_t packed) {
  const pm_opid alloc = pm_value_of(g, pm_view_base(g, ref))->def;
  uint32_t n;
  int64_t tiling[PM_MAX_RANK];
  const int64_t *tile = pm_attr_list(g, alloc, PM_ATTR_TILING, &n);
  for (uint32_t k = 0; k < n; k++) tiling[k] = k + 1 < n || !packed ? tile[k] : tile[k] * packed;
  if (*pm_attr(g, alloc, PM_ATTR_GIVEN) == PM_GIVEN_SWIZZLE) n = 0;
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

static const char *describe_tmem(const pm_graph *g, pm_val ref) {
  static const char *const names[PM_TMEM_COUNT] = {
      [PM_TMEM_DEFAULT] = "TMEM_DEFAULT",
      [PM_TMEM_HALF] = "TMEM_HALF_LANE",
      [PM_TMEM_M64] = "TMEMLayout.M64_COLLECTIVE_LAYOUT",
      [PM_TMEM_SCALES] = "TMEMLayout.SCALES_LAYOUT",
      [PM_TMEM_SCALES_M64] = "TMEMLayout.SCALES_M64_COLLECTIVE_LAYOUT",
      [PM_TMEM_METADATA] = "TMEMLayout.SPARSE_METADATA_LAYOUT",
  };
  const pm_tmem m = pm_tmem_of(g, pm_tmem_alloc(g, ref));
  const char *name = names[m.layout];
  const long long columns = m.columns;
  switch (m.layout) {
    case PM_TMEM_DEFAULT: return pm_printf(g->arena, "%s(packing=%d)", name, m.packing);
    case PM_TMEM_HALF:
    case PM_TMEM_M64: return pm_printf(g->arena, "%s(%lld, packing=%d)", name, columns, m.packing);
    default: return name;
  }
}

const char *pm_describe(const pm_graph *g, pm_val v, int64_t packed) {
  const pm_type *t = pm_typeof(g, v);
  if (t->kind == PM_REF && t->space == PM_TMEM) return describe_tmem(g, v);
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
