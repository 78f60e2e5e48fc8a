/* PTX of accesses to all devices at once (multimem): a function for each dtype, width and
 * operation, printed into the program where it is used (ptx.c). A store goes to all of them; a load
 * combines what they hold. Accesses have 4, 8 or 16 bytes; integers have no vectors. */
#include "gen.h"

/* "v4.bf16x2": n elements as one access of 4, 8 or 16 bytes; *words: of how many registers. */
static const char *access_type(pm_gen *e, pm_dtype d, int64_t n, bool store, int64_t *words) {
  const int64_t bytes = n * pm_dtypes[d].bytes, each = 4 / pm_dtypes[d].bytes;
  const char *type = store ? "f32" : pm_dtypes[d].short_name;
  *words = bytes / 4;
  if (bytes < 4) return NULL;
  if (!store && each > 1) type = pm_str(e, "%sx%lld", type, (long long)each);
  return *words > 1 ? pm_str(e, "v%lld.%s", (long long)*words, type) : type;
}

static const char *braces(pm_gen *e, int64_t first, int64_t n) {
  pm_text t;
  pm_text_init(&t, e->arena);
  for (int64_t k = 0; k < n; k++) pm_putf(&t, "%s%%%lld", k ? ", " : "", (long long)(first + k));
  return n > 1 ? pm_str(e, "{%s}", t.at) : t.at;
}

/* The words, each as the argument of a function ("f32_bits("), if there is one. */
static const char *operands(pm_gen *e, const char *constraint, const char *word, int64_t n) {
  pm_text t;
  pm_text_init(&t, e->arena);
  for (int64_t k = 0; k < n; k++) {
    pm_putf(&t, "%s\"%s\"(%sw[%lld]%s)", k ? ", " : "", constraint, word, (long long)k,
            *word ? ")" : "");
  }
  return t.at;
}

/* Integers have no vectors. */
static const char *load_function(pm_gen *e, const char *name, pm_dtype d, int64_t n, int64_t words,
                                 const char *type) {
  const bool whole = d == PM_I32 || d == PM_U32,
             bits = e->multimem[0] == 'a' && e->multimem[1] == 'n';
  const bool logical = whole && (bits || e->multimem[0] == 'o' || e->multimem[0] == 'x');
  const char *reg = d == PM_F32 ? "f32" : "u32", *c = d == PM_F32 ? "=f" : "=r";
  const char *cpp = pm_cpp_type(d);
  if (whole) type = logical ? "b32" : pm_dtypes[d].short_name;
  const char *head =
      pm_str(e, "// combined over all devices\nFN void %s(%s* x, const %s* a) {\n", name, cpp, cpp);
  if (whole) {
    return pm_str(e,
                  "%s  u32 w;\n"
                  "  for (int k = 0; k < %lld; k++) {\n"
                  "    asm volatile(\"multimem.ld_reduce.relaxed.sys.global.%s.%s %%0, [%%1];\"\n"
                  "                 : \"=r\"(w) : \"l\"(a + k) : \"memory\");\n"
                  "    x[k] = (%s)w;\n  }\n}\n",
                  head, (long long)n, e->multimem, type, cpp);
  }
  return pm_str(e,
                "%s  %s w[%lld];\n"
                "  asm volatile(\"multimem.ld_reduce.relaxed.sys.global.%s.%s %s, [%%%lld];\"\n"
                "               : %s : \"l\"(a) : \"memory\");\n"
                "  %s\n}\n",
                head, reg, (long long)words, e->multimem, type, braces(e, 0, words),
                (long long)words, operands(e, c, "", words),
                d == PM_F32 ? pm_str(e, "for (int k = 0; k < %lld; k++) x[k] = w[k];", (long long)n)
                            : pm_str(e, "unpack<%s, %lld>(x, w);", cpp, (long long)n));
}

const char *pm_multimem(pm_gen *e, const pm_view *v, int64_t n, bool store) {
  const pm_dtype d = (pm_dtype)v->dtype;
  int64_t words;
  const char *type = access_type(e, d, n, store, &words), *cpp = pm_cpp_type(d);
  const char *name = store ? pm_str(e, "st_multimem_%s_%lld", cpp, (long long)n)
                           : pm_str(e, "ld_multimem_%s_%s_%lld", e->multimem, cpp, (long long)n);
  if (!type) {
    e->async.narrow = true;
    return name;
  }
  if (!store) return pm_ptx(e, name, load_function(e, name, d, n, words, type));
  return pm_ptx(e, name,
                pm_str(e,
                       "// to all devices\nFN void %s(%s* a, const %s* x) {\n"
                       "  u32 w[%lld];\n"
                       "  pack<%s, %lld>(w, x);\n"
                       "  asm volatile(\"multimem.st.relaxed.sys.global.%s [%%0], %s;\"\n"
                       "               :: \"l\"(a), %s : \"memory\");\n}\n",
                       name, cpp, cpp, (long long)words, cpp, (long long)n, type,
                       braces(e, 1, words), operands(e, "f", "f32_bits(", words)));
}
