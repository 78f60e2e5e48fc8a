/* PTX of tcgen05 that is printed for a program: products, copies to tensor memory, and moves
 * between it and registers. See ptx.c. */
#include "gen.h"

/* "mxf4nvf4.block_scale.scale_vec::4X": mxf4nvf4_4x */
static const char *kind_name(pm_gen *e, const char *kind) {
  const size_t n = strlen(kind);
  const char *dot = strchr(kind, '.');
  if (!dot) return kind;
  return pm_str(e, "%.*s_%cx", (int)(dot - kind), kind, kind[n - 2]);
}

const char *pm_ptx_tcgen05(pm_gen *e, const pm_tcgen05_product *p) {
  const char *name =
      pm_str(e, "tcgen05_mma%s_%s%s%s", p->sparse ? "_sp" : "", kind_name(e, p->kind),
             p->pair ? "_pair" : "", p->a_in_tmem ? "_tmem" : "");
  pm_text t, operands;
  int n = 0; /* operands of the statement */
  pm_text_init(&t, e->arena);
  pm_text_init(&operands, e->arena);
  pm_putf(&t,
          "// D += A B, or D = A B, of one step along K; A in %s memory%s%s%s\nFN void %s(u32 d",
          p->a_in_tmem ? "tensor" : "shared", p->sparse ? ", 2:4 sparse" : "",
          p->block ? ", with scales" : "", p->pair ? "; of two blocks" : "", name);
  pm_put(&t, p->a_in_tmem ? ", u32 a" : ", u32 a, u32 a_high");
  pm_putf(&t, ", u32 b, u32 b_high, u32 instruction%s%s, bool adds) {\n",
          p->sparse ? ", u32 metadata" : "", p->block ? ", u32 a_scale, u32 b_scale" : "");
  pm_put(&t, "  asm volatile(\"{ .reg .pred p; .reg .b64 ");
  pm_put(&t, p->a_in_tmem ? "mb; " : "ma, mb; ");
  pm_put(&operands, "\"r\"(d), \"r\"(a), ");
  n = 2;
  if (!p->a_in_tmem) {
    pm_putf(&t, "mov.b64 ma, {%%1, %%2}; ");
    pm_put(&operands, "\"r\"(a_high), ");
    n++;
  }
  pm_putf(&t, "mov.b64 mb, {%%%d, %%%d}; ", n, n + 1);
  pm_put(&operands, "\"r\"(b), \"r\"(b_high), \"r\"(instruction), ");
  const int instruction = n + 2, metadata = n + 3, scales = metadata + p->sparse;
  const int adds = scales + (p->block ? 2 : 0);
  if (p->sparse) pm_put(&operands, "\"r\"(metadata), ");
  if (p->block) pm_put(&operands, "\"r\"(a_scale), \"r\"(b_scale), ");
  pm_putf(&t, "setp.ne.u32 p, %%%d, 0;\\n\"\n    \"%s [%%0], %s, mb, ", adds,
          pm_tcgen05_name(e->arena, p), p->a_in_tmem ? "[%1]" : "ma");
  if (p->sparse) pm_putf(&t, "[%%%d], ", metadata);
  pm_putf(&t, "%%%d, ", instruction);
  if (p->block) pm_putf(&t, "[%%%d], [%%%d], ", scales, scales + 1);
  pm_putf(&t, "p; }\"\n    :: %s\"r\"((u32)adds) : \"memory\");\n}\n", operands.at);
  return pm_ptx(e, name, t.at);
}

const char *pm_ptx_tcgen05_copy(pm_gen *e, const char *shape, bool pair) {
  pm_text name;
  pm_text_init(&name, e->arena);
  pm_put(&name, "tcgen05_copy_");
  for (const char *s = shape; *s && *s != ':'; s++) pm_putn(&name, *s == '.' ? "_" : s, 1);
  pm_put(&name, pair ? "_pair" : "");
  return pm_ptx(e, name.at,
                pm_str(e,
                       "// rows of a matrix in shared memory to lanes of tensor memory%s\n"
                       "FN void %s(u32 tmem, u32 low, u32 high) {\n"
                       "  asm volatile(\"{ .reg .b64 m; mov.b64 m, {%%1, %%2};\\n\"\n"
                       "    \"tcgen05.cp.cta_group::%d.%s [%%0], m; }\"\n"
                       "    :: \"r\"(tmem), \"r\"(low), \"r\"(high) : \"memory\");\n}\n",
                       pair ? ", of both blocks" : "", name.at, pair ? 2 : 1, shape));
}

/* Loads whose bytes are those of a barrier in either block of a pair, an address in the cluster. */
const char *pm_ptx_tma_pair(pm_gen *e, int rank, bool multicast) {
  const char *name = pm_str(e, "tma_%s_pair_%dd", multicast ? "multicast" : "load", rank);
  const int first = multicast ? 4 : 3; /* operand of the first coordinate */
  pm_text t;
  pm_text_init(&t, e->arena);
  pm_putf(&t,
          "// the bytes count on the barrier of one block of a pair, an address in the cluster\n"
          "FN void %s(u32 dst, const TensorMap* m, u32 barrier%s",
          name, multicast ? ", u32 mask" : "");
  for (int k = 0; k < rank; k++) pm_putf(&t, ", i32 c%d", k);
  pm_putf(&t,
          ") {\n  asm volatile(\"cp.async.bulk.tensor.%dd.shared::%s.global.tile"
          ".mbarrier::complete_tx::bytes\"\n               \"%s.cta_group::2 [%%0], [%%1, {",
          rank, multicast ? "cluster" : "cta", multicast ? ".multicast::cluster" : "");
  for (int k = 0; k < rank; k++) pm_putf(&t, "%s%%%d", k ? "," : "", first + k);
  pm_putf(&t, "}], [%%2]%s;\"\n               :: \"r\"(dst), \"l\"(m), \"r\"(barrier)%s",
          multicast ? ", %3" : "", multicast ? ", \"h\"((u16)mask)" : "");
  for (int k = 0; k < rank; k++) pm_putf(&t, ", \"r\"(c%d)", k);
  pm_put(&t, " : \"memory\");\n}\n");
  return pm_ptx(e, name, t.at);
}

/* ---- between registers and tensor memory --------------------------------------------------- */

/* Where the words of a part lie among each other, if they do not follow each other: numbers 1, 2, 4
 * ... tell, as the layouts have digits of powers of two. */
static const char *pattern_name(pm_gen *e, const struct pm_tcgen05_part *part) {
  bool plain = true;
  pm_text t;
  pm_text_init(&t, e->arena);
  pm_put(&t, "");
  for (uint32_t k = 1; k < part->words; k++) {
    plain = plain && part->word[k] == part->word[0] + k;
  }
  for (uint32_t k = 1; k < part->words && !plain; k *= 2) {
    pm_putf(&t, "_%d", part->word[k] - part->word[0]);
  }
  return t.at;
}

static const char *shape_name(pm_gen *e, const pm_tcgen05_move *m, uint32_t k) {
  pm_text t;
  pm_text_init(&t, e->arena);
  for (const char *s = pm_tcgen05_shape_text(e->arena, m, k); *s; s++) {
    pm_putn(&t, *s == '.' ? "_" : s, 1);
  }
  return t.at;
}

/* d[0], d[2], ..., as operands with a constraint or as addresses */
static void put_words(pm_text *t, const struct pm_tcgen05_part *p, const char *before,
                      const char *after) {
  for (uint32_t k = 0; k < p->words; k++) {
    pm_putf(t, "%s%sd[%d]%s",
            !k      ? ""
            : k % 8 ? ", "
                    : ",\n    ",
            before, p->word[k] - p->word[0], after);
  }
}

/* A host catalogue has functions of the registers' addresses. */
static void put_host_move(pm_text *t, const pm_tcgen05_move *m, uint32_t k, bool store) {
  const struct pm_tcgen05_part *p = &m->part[k];
  const char *shape = pm_tcgen05_shape_text(t->arena, m, k);
  pm_put(t, "  u32* const r[] = {");
  put_words(t, p, "(u32*)&", "");
  pm_putf(t, "};\n  tmem_%s_%.*s<%u, %s>(r, a, line);\n}\n", store ? "store" : "load",
          (int)strcspn(shape, "."), shape, p->times, m->halves ? "true" : "false");
}

/* {%0, %1, ...} */
static void put_list(pm_text *t, uint32_t first, uint32_t n) {
  pm_put(t, "{");
  for (uint32_t k = 0; k < n; k++) {
    pm_putf(t, "%s%%%u", !k ? "" : k % 16 ? "," : ",\"\n    \"", first + k);
  }
  pm_put(t, "}");
}

const char *pm_ptx_tmem_move(pm_gen *e, const pm_tcgen05_move *m, uint32_t k, bool store) {
  const struct pm_tcgen05_part *p = &m->part[k];
  const char *name = pm_str(e, "tmem_%s_%s%s%s", store ? "store" : "load", shape_name(e, m, k),
                            m->halves ? "_halves" : "", pattern_name(e, p));
  const bool calls = e->options->entry_only;
  pm_text t;
  pm_text_init(&t, e->arena);
  pm_putf(&t, "// %u registers %s tensor memory at a\nFN void %s(%su32* d, u32 a%s) {\n", p->words,
          store ? "to" : "from", name, store ? "const " : "", calls ? ", LINE" : "");
  if (calls) {
    put_host_move(&t, m, k, store);
    return pm_ptx_kept(e, name, t.at);
  }
  const char *shape = pm_tcgen05_shape_text(e->arena, m, k);
  if (store) {
    pm_putf(&t, "  asm volatile(\"tcgen05.st.sync.aligned.%s%s.b32 [%%0], \"\n    \"", shape,
            m->halves ? ".unpack::16b" : "");
    put_list(&t, 1, p->words);
    pm_put(&t, ";\"\n    :: \"r\"(a), ");
    put_words(&t, p, "\"r\"(", ")");
  } else {
    pm_putf(&t, "  asm volatile(\"tcgen05.ld.sync.aligned.%s%s.b32 \"\n    \"", shape,
            m->halves ? ".pack::16b" : "");
    put_list(&t, 0, p->words);
    pm_putf(&t, ", [%%%u];\"\n    : ", p->words);
    put_words(&t, p, "\"=r\"(", ")");
    pm_put(&t, " : \"r\"(a)");
  }
  pm_put(&t, store ? " : \"memory\");\n}\n" : " : \"memory\");\n}\n");
  return pm_ptx_kept(e, name, t.at);
}

/* .red: what it finds in the words of one part is a register of its own. */
const char *pm_ptx_tmem_reduce(pm_gen *e, const pm_tcgen05_move *m, uint32_t k, int64_t reduce,
                               pm_dtype d) {
  const struct pm_tcgen05_part *p = &m->part[k];
  const bool abs = reduce == PM_TMEM_REDUCE_ABSMAX || reduce == PM_TMEM_REDUCE_ABSMIN;
  const char *how = reduce == PM_TMEM_REDUCE_MAX || reduce == PM_TMEM_REDUCE_ABSMAX ? "max" : "min";
  const char *type = pm_dtypes[d].short_name, *shape = pm_tcgen05_shape_text(e->arena, m, k);
  const bool calls = e->options->entry_only;
  const char *name = pm_str(e, "tmem_load_%s%s_%s_%s%s", abs ? "abs" : "", how, type,
                            shape_name(e, m, k), pattern_name(e, p));
  pm_text t;
  pm_text_init(&t, e->arena);
  pm_putf(&t,
          "// %u registers from tensor memory at a, and their %simum%s\n"
          "FN void %s(u32* d, u32* reduced, u32 a%s) {\n",
          p->words, how, abs ? " without signs" : "", name, calls ? ", LINE" : "");
  if (calls) {
    pm_put(&t, "  u32* const r[] = {");
    put_words(&t, p, "(u32*)&", "");
    pm_putf(&t,
            "};\n  tmem_load_reduce<%u, HOST_%s%s, HOST_AS_%s>(r, reduced, a, true, line);\n}\n",
            p->times, abs ? "abs" : "r", how, pm_cpp_type(d));
    return pm_ptx_kept(e, name, t.at);
  }
  pm_putf(&t, "  asm volatile(\"tcgen05.ld.red.sync.aligned.%s.%s%s%s.%s \"\n    \"", shape, how,
          abs ? ".abs" : "", d == PM_F32 ? ".NaN" : "", type);
  put_list(&t, 0, p->words);
  pm_putf(&t, ", %%%u, [%%%u];\"\n    : ", p->words, p->words + 1);
  put_words(&t, p, "\"=r\"(", ")");
  pm_put(&t, ", \"=r\"(*reduced) : \"r\"(a) : \"memory\");\n}\n");
  return pm_ptx_kept(e, name, t.at);
}
