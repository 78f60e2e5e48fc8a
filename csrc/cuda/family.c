/* Device functions whose operand count varies: printed once for each shape that a program uses. */
#include "gen.h"

static const char *find(const pm_gen *e, const char *name) {
  for (uint32_t k = 0; k < e->n_families; k++) {
    if (!strcmp(e->families[k].name, name)) return e->families[k].name;
  }
  return NULL;
}

static const char *add(pm_gen *e, const char *name, const char *text) {
  if (e->n_families == e->cap_families) {
    e->families = pm_vec_grow(e->arena, e->families, e->n_families, &e->cap_families,
                              sizeof *e->families, e->n_families + 1);
  }
  e->families[e->n_families].text = text;
  e->families[e->n_families++].name = name;
  return name;
}

/* "+f"(d[0]), "+f"(d[1]), ... */
static void put_registers(pm_text *t, const char *constraint, int64_t n) {
  for (int64_t k = 0; k < n; k++) {
    pm_putf(t, "%s\"%s\"(d[%lld])", !k ? "" : k % 8 ? ", " : ",\n    ", constraint, (long long)k);
  }
}

const char *pm_family_pin(pm_gen *e, pm_dtype acc, int64_t n) {
  const char *type = acc == PM_F16 ? "u32" : pm_cpp_type(acc);
  const char *name = pm_str(e, "pin_%s_%lld", type, (long long)n);
  if (find(e, name)) return name;
  pm_text t;
  pm_text_init(&t, e->arena);
  pm_putf(&t, "// no access to these registers moves across\nFN void %s(%s* d) {\n", name, type);
  pm_put(&t, "  asm volatile(\"\" :\n    ");
  put_registers(&t, acc == PM_F32 ? "+f" : "+r", n);
  pm_put(&t, "\n    :: \"memory\");\n}\n");
  return add(e, name, t.at);
}

/* Predicate p says whether what d held is added. */
static void put_instruction(pm_text *t, const pm_wgmma *w, int regs) {
  const char *in = pm_cpp_type(w->type), *out = pm_cpp_type(w->acc);
  int next = regs;
  pm_putf(t, "  asm volatile(\"{ .reg .pred p; .reg .b64 ma, mb; setp.%s.b32 p, 0, 0;\\n\"\n",
          w->fresh ? "ne" : "eq");
  if (w->a_in_registers) {
    next += 4;
  } else {
    pm_putf(t, "    \"mov.b64 ma, {%%%d, %%%d};\\n\"\n", next, next + 1);
    next += 2;
  }
  pm_putf(t, "    \"mov.b64 mb, {%%%d, %%%d};\\n\"\n", next, next + 1);
  pm_putf(t, "    \"wgmma.mma_async.sync.aligned.m64n%lldk16.%s.%s.%s {\"\n", (long long)w->n, out,
          in, in);
  for (int k = 0; k < regs; k++) {
    pm_putf(t, "%s%%%d%s", k % 16 ? "" : "    \"", k, k + 1 < regs ? "," : "}, \"\n");
    if (k % 16 == 15 && k + 1 < regs) pm_put(t, "\"\n");
  }
  if (w->a_in_registers) {
    pm_putf(t, "    \"{%%%d,%%%d,%%%d,%%%d}, mb, p, 1, 1, %d; }\"\n    : ", regs, regs + 1,
            regs + 2, regs + 3, w->transpose_b);
  } else {
    pm_putf(t, "    \"ma, mb, p, 1, 1, %d, %d; }\"\n    : ", w->transpose_a, w->transpose_b);
  }
}

const char *pm_family_wgmma(pm_gen *e, const pm_wgmma *w) {
  const int regs = (int)(w->acc == PM_F32 ? w->n / 2 : w->n / 4);
  const char *name =
      pm_str(e, "wgmma_m64n%lldk16_%s_%s_%c%c%s", (long long)w->n, pm_cpp_type(w->acc),
             pm_cpp_type(w->type), w->a_in_registers ? 'r' : w->transpose_a ? 'm' : 'k',
             w->transpose_b ? 'n' : 'k', w->fresh ? "_fresh" : "");
  if (find(e, name)) return name;
  pm_text t;
  pm_text_init(&t, e->arena);
  pm_putf(&t, "// d %s A B; %s, B in shared memory, contiguous along %s\n", w->fresh ? "=" : "+=",
          w->a_in_registers ? "A in registers"
          : w->transpose_a  ? "A in shared memory, contiguous along M"
                            : "A in shared memory, contiguous along K",
          w->transpose_b ? "N" : "K");
  pm_putf(&t, "FN void %s(%s* d, %s, u32 b, u32 b_high) {\n", name,
          w->acc == PM_F32 ? "f32" : "u32",
          w->a_in_registers ? "const u32* a" : "u32 a, u32 a_high");
  put_instruction(&t, w, regs);
  put_registers(&t, pm_str(e, "%s%c", w->fresh ? "=" : "+", w->acc == PM_F32 ? 'f' : 'r'), regs);
  pm_put(&t, "\n    : ");
  if (w->a_in_registers) {
    pm_put(&t, "\"r\"(a[0]), \"r\"(a[1]), \"r\"(a[2]), \"r\"(a[3]), ");
  } else {
    pm_put(&t, "\"r\"(a), \"r\"(a_high), ");
  }
  pm_put(&t, "\"r\"(b), \"r\"(b_high)\n    : \"memory\");\n}\n");
  return add(e, name, t.at);
}
