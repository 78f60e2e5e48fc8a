/* PTX that is printed for a program: device functions whose operands or text vary with its shapes.
 * Each is printed once, before the program, under a name that says what varies. */
#include "gen.h"

static const char *find(const pm_gen *e, const char *name) {
  for (uint32_t k = 0; k < e->n_ptx; k++) {
    if (!strcmp(e->ptx[k].name, name)) return e->ptx[k].name;
  }
  return NULL;
}

static const char *add(pm_gen *e, const char *name, const char *text) {
  if (e->n_ptx == e->cap_ptx) {
    e->ptx = pm_vec_grow(e->arena, e->ptx, e->n_ptx, &e->cap_ptx, sizeof *e->ptx, e->n_ptx + 1);
  }
  e->ptx[e->n_ptx].text = text;
  e->ptx[e->n_ptx++].name = name;
  return name;
}

/* Another catalogue has its own. */
static const char *add_own(pm_gen *e, const char *name, const char *text) {
  return add(e, name, e->options->entry_only ? NULL : text);
}

static const char *once(pm_gen *e, const char *name, const char *text) {
  return find(e, name) ? name : add_own(e, name, text);
}

/* For another catalogue, too: the text is for it. */
static const char *kept(pm_gen *e, const char *name, const char *text) {
  return find(e, name) ? name : add(e, name, text);
}

/* Registers that one statement takes where it need not take all: the compiler's time grows with the
 * square of the operands. (With fewer in a pin, ptxas made attention 1 % slower.) */
enum { PINNED_AT_ONCE = 32, READ_AT_ONCE = 16 };

/* "+f"(d[0]), "+f"(d[1]), ... */
static void put_registers(pm_text *t, const char *constraint, int64_t n) {
  for (int64_t k = 0; k < n; k++) {
    pm_putf(t, "%s\"%s\"(d[%lld])", !k ? "" : k % 8 ? ", " : ",\n    ", constraint, (long long)k);
  }
}

const char *pm_ptx_pin(pm_gen *e, pm_dtype acc, int64_t n) {
  const char *type = acc == PM_F16 ? "u32" : pm_cpp_type(acc);
  const char *name = pm_str(e, "pin_%s_%lld", type, (long long)n);
  if (find(e, name)) return name;
  pm_text t;
  pm_text_init(&t, e->arena);
  pm_putf(&t, "// no access to these registers moves across\nFN void %s(%s* d) {\n", name, type);
  for (int64_t from = 0; from < n; from += PINNED_AT_ONCE) {
    pm_put(&t, "  asm volatile(\"\" : ");
    for (int64_t k = from; k < pm_min(n, from + PINNED_AT_ONCE); k++) {
      pm_putf(&t, "%s\"+%s\"(d[%lld])", k > from ? ", " : "", acc == PM_F32 ? "f" : "r",
              (long long)k);
    }
    pm_put(&t, " :: \"memory\");\n");
  }
  pm_put(&t, "}\n");
  return add_own(e, name, t.at);
}

/* ---- accumulators that are registers of PTX ----------------------------------------------- */

/* Of an accumulator acc they are acc_0, acc_1, ...; asm volatile keeps its order. */

static const char *part_name(pm_gen *e, const char *acc, const char *what, int64_t first,
                             int64_t n) {
  return pm_str(e, "%s_%s_%lld_%lld", acc, what, (long long)first, (long long)n);
}

const char *pm_ptx_declare(pm_gen *e, const char *acc, pm_dtype d, int64_t n) {
  return add_own(e, pm_str(e, "%s_declare", acc),
                 pm_str(e,
                        "// an accumulator in registers of PTX, which every product names\n"
                        "FN void %s_declare() { asm volatile(\".reg .%s %s_<%lld>;\"); }\n",
                        acc, pm_dtypes[d].short_name, acc, (long long)n));
}

const char *pm_ptx_list(pm_gen *e, const char *acc, int64_t first, int64_t n) {
  const char *name = part_name(e, acc, "list", first, n);
  if (find(e, name)) return name;
  pm_text t;
  pm_text_init(&t, e->arena);
  pm_putf(&t, "// the operand of a product: registers %lld to %lld\n#define %s \"{",
          (long long)first, (long long)(first + n - 1), name);
  for (int64_t k = 0; k < n; k++) {
    pm_putf(&t, "%s_%lld%s", acc, (long long)(first + k), k + 1 < n ? "," : "}\"\n");
  }
  return add_own(e, name, t.at);
}

const char *pm_ptx_read(pm_gen *e, const char *acc, pm_dtype d, pm_dtype to, int64_t first,
                        int64_t n) {
  const bool pairs = to != d; /* to 16 bits, which is an instruction for each word */
  const char *type = pm_dtypes[d].short_name, *narrow = pm_dtypes[to].short_name;
  const char *what = pairs ? pm_str(e, "read_%s", narrow) : "read";
  const char *name = part_name(e, acc, what, first, n);
  const char letter = !pairs && d == PM_F32 ? 'f' : 'r';
  if (find(e, name)) return name;
  pm_text t;
  pm_text_init(&t, e->arena);
  pm_putf(&t, "// copies registers %lld to %lld%s\nFN void %s(%s* d) {\n", (long long)first,
          (long long)(first + n - 1), pairs ? pm_str(e, ", as %s", narrow) : "", name,
          pairs ? "u32" : pm_cpp_type(d));
  if (pairs) n /= 2;
  for (int64_t from = 0; from < n; from += READ_AT_ONCE) {
    const int64_t count = pm_min(n - from, READ_AT_ONCE);
    pm_put(&t, "  asm volatile(\"");
    for (int64_t k = 0; k < count; k++) {
      const long long word = from + k, at = first + (pairs ? 2 : 1) * word;
      pm_put(&t, k ? " " : "");
      if (pairs)
        pm_putf(&t, "cvt.rn.%sx2.f32 %%%lld, %s_%lld, %s_%lld;", narrow, (long long)k, acc, at + 1,
                acc, at);
      else pm_putf(&t, "mov.%s %%%lld, %s_%lld;", type, (long long)k, acc, at);
    }
    pm_put(&t, "\"\n    : ");
    for (int64_t k = 0; k < count; k++)
      pm_putf(&t, "%s\"=%c\"(d[%lld])", k ? ", " : "", letter, (long long)(from + k));
    pm_put(&t, ");\n");
  }
  pm_put(&t, "}\n");
  return add_own(e, name, t.at);
}

const char *pm_ptx_write(pm_gen *e, const char *acc, pm_dtype d, int64_t n) {
  const char *name = pm_str(e, "%s_write", acc), *type = pm_dtypes[d].short_name;
  if (find(e, name)) return name;
  pm_text t;
  pm_text_init(&t, e->arena);
  pm_putf(&t, "// copies an array to them\nFN void %s(const %s* d) {\n", name, pm_cpp_type(d));
  for (int64_t from = 0; from < n; from += READ_AT_ONCE) {
    const int64_t end = pm_min(n, from + READ_AT_ONCE);
    pm_put(&t, "  asm volatile(\"");
    for (int64_t k = from; k < end; k++)
      pm_putf(&t, "%smov.%s %s_%lld, %%%lld;", k > from ? " " : "", type, acc, (long long)k,
              (long long)(k - from));
    pm_put(&t, "\"\n    :: ");
    for (int64_t k = from; k < end; k++)
      pm_putf(&t, "%s\"%c\"(d[%lld])", k > from ? ", " : "", d == PM_F32 ? 'f' : 'r', (long long)k);
    pm_put(&t, ");\n");
  }
  pm_put(&t, "}\n");
  return add_own(e, name, t.at);
}

const char *pm_ptx_zero(pm_gen *e, const char *acc, pm_dtype d, int64_t n) {
  const char *name = pm_str(e, "%s_zero", acc);
  if (find(e, name)) return name;
  pm_text t;
  pm_text_init(&t, e->arena);
  pm_putf(&t, "// begins a sum\nFN void %s() {\n  asm volatile(\"", name);
  for (int64_t k = 0; k < n; k++) {
    pm_putf(&t, "%smov.%s %s_%lld, %s;", k ? " " : "", pm_dtypes[d].short_name, acc, (long long)k,
            d == PM_F32 ? "0f00000000" : "0");
  }
  pm_put(&t, "\");\n}\n");
  return add_own(e, name, t.at);
}

/* ---- products ----------------------------------------------------------------------------- */

/* All steps along K are one statement: each would otherwise take all registers of the accumulator
 * through the compiler, which is most of what a product costs it. It begins with the fence that
 * registers need which others wrote: they are its operands, so no compiler writes one of them after
 * it. With registers of PTX none is an operand; then the statement is a macro, as names in it are
 * those of one accumulator. The predicates say whether what d held is added: p0 no, p1 yes. */

/* Every register of a block is assigned once: registers of its own for each step. Where steps
 * shared them, ptxas 13.3 to 13.5 dropped products, so that runtime/count.c counts what is left. */

/* The descriptors of step k: low words move on, high words stay. */
static void put_descriptor(pm_text *t, char which, const pm_sum *at, int64_t k, int operand) {
  const long long offset = pm_sum_at(at, k), step = k;
  if (offset) {
    pm_putf(t, "add.u32 t%c%lld, %%%d, %lld; mov.b64 m%c%lld, {t%c%lld, %%%d}; ", which, step,
            operand, offset, which, step, which, step, operand + 1);
  } else {
    pm_putf(t, "mov.b64 m%c%lld, {%%%d, %%%d}; ", which, step, operand, operand + 1);
  }
}

/* "f16", "e4m3_e5m2": the types of a and b in names of functions */
static const char *types_name(pm_gen *e, const pm_mma *m) {
  const char *dot = strchr(m->types, '.');
  const int n = (int)(dot - m->types);
  return m->a == m->b ? pm_str(e, "%.*s", n, m->types) : pm_str(e, "%.*s_%s", n, m->types, dot + 1);
}

/* After the predicate: factors 1 of A and B, of floats; then which operands are transposed, of 16
 * bits. */
static void put_immediates(pm_text *t, const pm_wgmma *w) {
  if (pm_is_float(w->mma->acc)) pm_put(t, ", 1, 1");
  if (w->mma->majors != PM_MAJORS_ANY) return;
  if (w->a) pm_putf(t, ", %d", w->transpose_a);
  pm_putf(t, ", %d", w->transpose_b);
}

static void put_step(pm_text *t, const pm_wgmma *w, int64_t k, int regs) {
  const int a = regs + (w->a ? 0 : (int)k * 4), b = regs + (w->a ? 2 : (int)w->steps * 4);
  const bool overwrites = w->contents != PM_ADDED_TO;
  const int adds = !overwrites || k;
  pm_put(t, "    \"");
  if (!k || (k == 1 && overwrites)) {
    pm_putf(t, "setp.%s.b32 p%d, 0, 0; ", adds ? "eq" : "ne", adds);
  }
  if (w->a) put_descriptor(t, 'a', w->a, k, a);
  put_descriptor(t, 'b', w->b, k, b);
  pm_putf(t, "\\n\"\n    \"wgmma.mma_async.sync.aligned.m64n%lldk%d.%s.%s \" D \", ",
          (long long)w->n, w->mma->k, pm_dtypes[w->mma->acc].short_name, w->mma->types);
  if (w->a) {
    pm_putf(t, "ma%lld", (long long)k);
  } else {
    pm_putf(t, "{%%%d,%%%d,%%%d,%%%d}", a, a + 1, a + 2, a + 3);
  }
  pm_putf(t, ", mb%lld, p%d", (long long)k, adds);
  put_immediates(t, w);
  pm_putf(t, ";%s\n", k + 1 < w->steps ? "\\n\"" : " }\"");
}

/* The asm statement after the definition of D, the registers. */
static void put_statement(pm_text *t, const pm_wgmma *w, int regs) {
  const int before = w->in_ptx ? 0 : regs; /* operands */
  const long long n = w->steps;
  pm_put(t, "  asm volatile(\"{ .reg .pred p<2>; ");
  if (w->a) pm_putf(t, ".reg .b64 ma<%lld>; .reg .b32 ta<%lld>; ", n, n);
  pm_putf(t, ".reg .b64 mb<%lld>; .reg .b32 tb<%lld>;\\n\"\n", n, n);
  pm_put(t, "    \"wgmma.fence.sync.aligned;\\n\"\n");
  for (int64_t k = 0; k < w->steps; k++) put_step(t, w, k, before);
  pm_put(t, "    : ");
  const char letter = w->mma->acc == PM_F32 ? 'f' : 'r';
  const char constraint[3] = {w->contents == PM_FRESH ? '=' : '+', letter};
  put_registers(t, constraint, before);
  pm_put(t, "\n    : ");
  for (int64_t k = 0; !w->a && k < w->steps * 4; k++) {
    pm_putf(t, w->in_ptx ? "\"r\"((a)[%lld]), " : "\"r\"(a[%lld]), ", (long long)k);
  }
  if (w->a) pm_put(t, "\"r\"(a), \"r\"(a_high), ");
  pm_put(t, "\"r\"(b), \"r\"(b_high)\n    : \"memory\")");
}

static void put_function(pm_text *t, const pm_wgmma *w, int regs) {
  pm_put(t, "#define D \"{");
  for (int k = 0; k < regs; k++) pm_putf(t, "%%%d%s", k, k + 1 < regs ? "," : "}\"\n");
  put_statement(t, w, regs);
  pm_put(t, ";\n#undef D\n}\n");
}

static void put_macro(pm_gen *e, pm_text *t, const pm_wgmma *w, const char *name) {
  pm_text text;
  pm_text_init(&text, e->arena);
  put_statement(&text, w, 0);
  pm_putf(t, "#define %s(D, a, %sb, b_high) \\\n", name, w->a ? "a_high, " : "");
  for (const char *line = text.at, *end; *line; line = end) {
    end = strchr(line, '\n');
    const size_t n = end ? (size_t)(end++ - line) : strlen(line);
    if (!end) end = line + n;
    pm_putn(t, line, n);
    pm_put(t, *end ? " \\\n" : "\n");
  }
}

/* For another catalogue, which has functions of one step. */
static void put_calls(pm_text *t, const pm_wgmma *w, const char *one) {
  pm_put(t, "  wgmma_fence(line);\n");
  for (int64_t k = 0; k < w->steps; k++) {
    pm_putf(t, "  %s%s(d, ", one, w->contents != PM_ADDED_TO && !k ? "_fresh" : "");
    if (w->a) {
      pm_putf(t, "a + %lld, a_high, ", (long long)pm_sum_at(w->a, k));
    } else {
      pm_putf(t, "a + %lld, ", (long long)(k * 4));
    }
    pm_putf(t, "b + %lld, b_high, line);\n", (long long)pm_sum_at(w->b, k));
  }
  pm_put(t, "}\n");
}

const char *pm_ptx_wgmma(pm_gen *e, const pm_wgmma *w) {
  const int regs = (int)(w->mma->acc == PM_F16 ? w->n / 4 : w->n / 2);
  const bool calls = e->options->entry_only;
  const char *one = pm_str(e, "wgmma_m64n%lldk%d_%s_%s_%c%c", (long long)w->n, w->mma->k,
                           pm_dtypes[w->mma->acc].short_name, types_name(e, w->mma),
                           !w->a            ? 'r'
                           : w->transpose_a ? 'm'
                                            : 'k',
                           w->transpose_b ? 'n' : 'k');
  pm_text name;
  pm_text_init(&name, e->arena);
  pm_putf(&name, "%s_x%lld%s%s", one, (long long)w->steps,
          w->contents == PM_FRESH  ? "_fresh"
          : w->contents == PM_HELD ? "_held"
                                   : "",
          w->in_ptx ? "_ptx" : "");
  /* what distinguishes tiles of other extents */
  for (int64_t k = 1; k < w->steps; k *= 2) {
    pm_putf(&name, "_%lld", (long long)pm_sum_at(w->b, k));
    if (w->a) pm_putf(&name, "_%lld", (long long)pm_sum_at(w->a, k));
  }
  if (find(e, name.at)) return name.at;
  pm_text t;
  pm_text_init(&t, e->arena);
  pm_putf(&t, "// d %s A B, %lld times %d along K; %s, B in shared memory, contiguous along %s\n",
          w->contents == PM_ADDED_TO ? "+=" : "=", (long long)w->steps, w->mma->k,
          !w->a            ? "A in registers"
          : w->transpose_a ? "A in shared memory, contiguous along M"
                           : "A in shared memory, contiguous along K",
          w->transpose_b ? "N" : "K");
  if (w->steps > 1)
    pm_put(&t, "// (the last numbers of the name: where steps 1, 2, 4 ... begin, in 16 bytes)\n");
  if (w->in_ptx) {
    put_macro(e, &t, w, name.at);
    return add(e, name.at, t.at);
  }
  pm_putf(&t, "FN void %s(%s* d, %s, u32 b, u32 b_high%s) {\n", name.at,
          w->mma->acc == PM_F16 ? "u32" : pm_cpp_type(w->mma->acc),
          w->a ? "u32 a, u32 a_high" : "const u32* a", calls ? ", LINE" : "");
  if (calls) {
    put_calls(&t, w, one);
  } else {
    put_function(&t, w, regs);
  }
  return add(e, name.at, t.at);
}

const char *pm_ptx_mma(pm_gen *e, const pm_mma *m) {
  const char *out = pm_dtypes[m->acc].short_name, *shape = pm_str(e, "m16n8k%d", m->k);
  const char *name = pm_str(e, "mma_%s_%s_%s", shape, out, types_name(e, m));
  const char *c = m->acc == PM_F32 ? "f" : "r";
  if (find(e, name)) return name;
  pm_text t;
  pm_text_init(&t, e->arena);
  pm_putf(&t, "// d += A B\nFN void %s(%s* d, const u32* a, const u32* b) {\n", name,
          pm_cpp_type(m->acc));
  pm_putf(&t, "  asm volatile(\"mma.sync.aligned.%s.row.col.%s.%s.%s \"\n", shape, out, m->types,
          out);
  pm_put(&t, "    \"{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};\"\n    : ");
  put_registers(&t, pm_str(e, "=%s", c), 4);
  pm_put(&t,
         "\n    : \"r\"(a[0]), \"r\"(a[1]), \"r\"(a[2]), \"r\"(a[3]), \"r\"(b[0]), "
         "\"r\"(b[1]),\n      ");
  put_registers(&t, c, 4);
  pm_put(&t, ");\n}\n");
  return add_own(e, name, t.at);
}

/* ---- atomics ----------------------------------------------------------------------------- */

/* Of halves there is no such instruction: a loop around compare-and-swap. */
static void put_atomic_loop(pm_text *t, const char *type, int64_t kind, const char *where,
                            bool returns) {
  const char *fn = pm_enum_text(PM_ENUM_ATOMIC, kind);
  pm_put(t, "  u16 seen, old, next;\n");
  pm_putf(t,
          "  asm volatile(\"ld.relaxed.%s.b16 %%0, [%%1];\" : \"=h\"(seen) : \"%s\"(a) : "
          "\"memory\");\n",
          where, *where == 'g' ? "l" : "r");
  pm_put(t, "  do {\n    old = seen;\n");
  if (kind == PM_ATOMIC_ADD) pm_putf(t, "    next = (%s{old} + x).bits;\n", type);
  else
    pm_putf(t, "    next = cvt_%s(%s_f32(cvt_f32(%s{old}), cvt_f32(x))).bits;\n", type, fn, type);
  pm_putf(t,
          "    asm volatile(\"atom.relaxed.%s.cas.b16 %%0, [%%1], %%2, %%3;\"\n"
          "                 : \"=h\"(seen) : \"%s\"(a), \"h\"(old), \"h\"(next) : "
          "\"memory\");\n",
          where, *where == 'g' ? "l" : "r");
  pm_put(t, "  } while (seen != old);\n");
  if (returns) pm_putf(t, "  return %s{old};\n", type);
}

/* Relaxed: at the scope of all who can reach the memory. */
static const char *atomic_where(const pm_gen *e, const char *space) {
  if (*space == 'g') return pm_n_devices(e->g) > 1 ? "sys.global" : "gpu.global";
  return *space == 's' ? "cta.shared" : "cluster.shared::cluster";
}

const char *pm_ptx_atomic(pm_gen *e, int64_t kind, pm_dtype d, const char *space, bool returns) {
  const char *type = pm_cpp_type(d), *fn = pm_enum_text(PM_ENUM_ATOMIC, kind);
  const char *name = pm_str(e, "%s_%s_%s_%s", returns ? "atom" : "red", fn, type, space);
  const char *where = atomic_where(e, space);
  const char *address = *space == 'g' ? "l" : "r", *op = kind == PM_ATOMIC_XCHG ? "exch" : fn;
  const bool half = d == PM_F16 || d == PM_BF16, cas = kind == PM_ATOMIC_CAS;
  const bool minmax = kind == PM_ATOMIC_MIN || kind == PM_ATOMIC_MAX;
  const bool adds = kind == PM_ATOMIC_ADD && d == PM_BF16 && !pm_target_has(e->target, PM_HAS_BF16);
  if (find(e, name)) return name;
  pm_text t;
  pm_text_init(&t, e->arena);
  pm_putf(&t, "// %s\nFN %s %s(%s a, %s%s x) {\n",
          returns ? "gives what was there" : "without a result", returns ? type : "void", name,
          *space == 'g' ? pm_str(e, "%s*", type) : "u32",
          cas ? pm_str(e, "%s compare, ", type) : "", type);
  if ((half && minmax) || adds) {
    put_atomic_loop(&t, type, kind, where, returns);
  } else {
    /* add and its like see a number, the others see bits */
    const char *kind_text = "b32", *c = half ? "h" : "r", *x = half ? "x.bits" : "bits_of(x)";
    if (half) kind_text = pm_str(e, "noftz.%s", type);
    if (!half && (minmax || kind == PM_ATOMIC_ADD)) kind_text = pm_dtypes[d].short_name;
    if (d == PM_F32 && kind == PM_ATOMIC_ADD) c = "f", x = "x";
    const bool as_is = *c == 'f';
    if (returns) pm_putf(&t, "  %s r;\n", half ? "u16" : as_is ? "f32" : "u32");
    pm_putf(&t, "  asm volatile(\"%s.relaxed.%s.%s.%s %s[%%%d], %%%d%s;\"\n",
            returns ? "atom" : "red", where, op, kind_text, returns ? "%0, " : "", returns,
            returns + 1, cas ? pm_str(e, ", %%%d", returns + 2) : "");
    pm_putf(&t, "               : %s: \"%s\"(a), ", returns ? pm_str(e, "\"=%s\"(r) ", c) : "",
            address);
    if (cas) pm_putf(&t, "\"%s\"(bits_of(compare)), ", c);
    pm_putf(&t, "\"%s\"(%s) : \"memory\");\n", c, x);
    if (returns && half) pm_putf(&t, "  return %s{r};\n", type);
    if (returns && as_is) pm_put(&t, "  return r;\n");
    if (returns && !half && !as_is) pm_putf(&t, "  %s y; from_bits(y, r); return y;\n", type);
  }
  pm_put(&t, "}\n");
  return add_own(e, name, t.at);
}

const char *pm_ptx_constant(pm_gen *e, const char *name, uint32_t x, const char *comment) {
  if (find(e, name)) return name;
  return add(e, name, pm_str(e, "// %s\nconstexpr u32 %s = 0x%08xu;\n", comment, name, x));
}

/* ---- copies that combine what they bring with what is there --------------------------------
 *
 * An engine does each element at once; lanes use atomics. */

/* "add", "min" ...: without the sign, which the type says */
static const char *op_text(int64_t combine) {
  const char *text = pm_enum_text(PM_ENUM_COMBINE, combine);
  const bool signs = combine >= PM_COMBINE_UMIN && combine <= PM_COMBINE_SMAX;
  return signs ? text + 1 : text;
}

const char *pm_tma_combine(pm_gen *e, int64_t combine, int rank) {
  const char *op = op_text(combine);
  const char *name = pm_str(e, "tma_%s_%dd", op, rank);
  pm_text t;
  pm_text_init(&t, e->arena);
  pm_putf(&t, "// a box is combined with the tensor: %s\n", op);
  pm_putf(&t, "FN void %s(const TensorMap* m, u32 src", name);
  for (int k = 0; k < rank; k++) pm_putf(&t, ", i32 c%d", k);
  pm_putf(&t,
          ") {\n  asm volatile(\"cp.reduce.async.bulk.tensor.%dd.global.shared::cta.%s.tile"
          ".bulk_group [%%0, {",
          rank, op);
  for (int k = 0; k < rank; k++) pm_putf(&t, "%s%%%d", k ? "," : "", k + 2);
  pm_put(&t, "}], [%1];\"\n               :: \"l\"(m), \"r\"(src)");
  for (int k = 0; k < rank; k++) pm_putf(&t, ", \"r\"(c%d)", k);
  pm_put(&t, " : \"memory\");\n}\n");
  return once(e, name, t.at);
}

/* As cp.reduce.async.bulk calls the type of the elements. */
static const char *type_text(int64_t combine, pm_dtype as) {
  const bool bits = combine >= PM_COMBINE_AND;
  return bits ? "b32" : pm_dtypes[as].short_name;
}

const char *pm_bulk_combine(pm_gen *e, int64_t combine, pm_dtype d) {
  const char *op = op_text(combine);
  pm_dtype as;
  pm_combine_atomic(combine, d, &as);
  const char *name = pm_str(e, "bulk_%s_%s", op, pm_cpp_type(as));
  const bool half = pm_dtypes[as].bits == 16;
  pm_text t;
  pm_text_init(&t, e->arena);
  pm_putf(&t, "// contiguous elements are combined with what is there: %s\n", op);
  pm_putf(&t, "FN void %s(void* dst, u32 src, u32 bytes) {\n", name);
  pm_putf(&t,
          "  asm volatile(\"cp.reduce.async.bulk.global.shared::cta.bulk_group.%s%s.%s"
          " [%%0], [%%1], %%2;\"\n",
          op, half && combine == PM_COMBINE_ADD ? ".noftz" : "", type_text(combine, as));
  pm_put(&t, "               :: \"l\"(dst), \"r\"(src), \"r\"(bytes) : \"memory\");\n}\n");
  return once(e, name, t.at);
}

/* *type: that of the elements */
const char *pm_lane_combine(pm_gen *e, int64_t combine, pm_dtype d, const char **type) {
  const char *op = op_text(combine);
  pm_dtype as;
  const int kind = pm_combine_atomic(combine, d, &as);
  *type = pm_cpp_type(as);
  if (kind >= 0) return pm_ptx_atomic(e, kind, as, "global", false);
  const char *name = pm_str(e, "red_%s_u32_global", op);
  return once(
      e, name,
      pm_str(e,
             "// %s\nFN void %s(u32* a, u32 x) {\n"
             "  asm volatile(\"red.relaxed.%s.%s.u32 [%%0], %%1;\"\n"
             "               :: \"l\"(a), \"r\"(x) : \"memory\");\n}\n",
             combine == PM_COMBINE_INC ? "plus one, which wraps to zero after x"
                                       : "less one, which wraps to x after zero or from above x",
             name, atomic_where(e, "global"), op));
}

const char *pm_async_combine(pm_gen *e, int64_t combine, pm_dtype d) {
  const char *op = op_text(combine), *type = pm_cpp_type(d);
  const char *as = combine >= PM_COMBINE_AND ? "b32" : pm_dtypes[d].short_name;
  const char *name = pm_str(e, "red_async_%s_%s", op, type);
  return once(
      e, name,
      pm_str(e,
             "// one element in a block of the cluster, as 4 bytes for the barrier there\n"
             "FN void %s(u32 a, %s x, u32 b) {\n"
             "  asm volatile(\"red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx"
             "::bytes.%s.%s [%%0], %%1, [%%2];\"\n"
             "               :: \"r\"(a), \"r\"(x), \"r\"(b) : \"memory\");\n}\n",
             name, type, op, as));
}

/* ---- accesses to all devices (multimem) --------------------------------------------------- */

/* A function for each dtype, width and operation. A store goes to all devices; a load combines what
 * they hold. Accesses have 4, 8 or 16 bytes; integers have no vectors. */

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

const char *pm_ptx_multimem(pm_gen *e, const pm_view *v, int64_t n, bool store) {
  const pm_dtype d = (pm_dtype)v->dtype;
  int64_t words;
  const char *type = access_type(e, d, n, store, &words), *cpp = pm_cpp_type(d);
  const char *name = store ? pm_str(e, "st_multimem_%s_%lld", cpp, (long long)n)
                           : pm_str(e, "ld_multimem_%s_%s_%lld", e->multimem, cpp, (long long)n);
  if (!type) {
    e->async.narrow = true;
    return name;
  }
  if (!store) return once(e, name, load_function(e, name, d, n, words, type));
  return once(e, name,
              pm_str(e,
                     "// to all devices\nFN void %s(%s* a, const %s* x) {\n"
                     "  u32 w[%lld];\n"
                     "  pack<%s, %lld>(w, x);\n"
                     "  asm volatile(\"multimem.st.relaxed.sys.global.%s [%%0], %s;\"\n"
                     "               :: \"l\"(a), %s : \"memory\");\n}\n",
                     name, cpp, cpp, (long long)words, cpp, (long long)n, type, braces(e, 1, words),
                     operands(e, "f", "f32_bits(", words)));
}

/* ---- products in tensor memory ------------------------------------------------------------ */

/* A stand-in has functions of its own under the same names. */
static const char *add_tcgen05(pm_gen *e, const char *name, const char *text) {
  return pm_stands_in(e) ? kept(e, name, NULL) : once(e, name, text);
}

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
  return add_tcgen05(e, name, t.at);
}

const char *pm_ptx_tcgen05_copy(pm_gen *e, const char *shape, bool pair) {
  pm_text name;
  pm_text_init(&name, e->arena);
  pm_put(&name, "tcgen05_copy_");
  for (const char *s = shape; *s && *s != ':'; s++) pm_putn(&name, *s == '.' ? "_" : s, 1);
  pm_put(&name, pair ? "_pair" : "");
  return once(e, name.at,
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
  return add_tcgen05(e, name, t.at);
}

/* ---- between registers and tensor memory -------------------------------------------------- */

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

/* Other catalogues have functions of the registers' addresses. */
static void put_move(pm_text *t, const pm_tcgen05_move *m, uint32_t k, bool store,
                     const char *line) {
  const struct pm_tcgen05_part *p = &m->part[k];
  const char *shape = pm_tcgen05_shape_text(t->arena, m, k);
  pm_put(t, "  u32* const r[] = {");
  put_words(t, p, "(u32*)&", "");
  pm_putf(t, "};\n  tmem_%s_%.*s<%u, %s>(r, a%s);\n}\n", store ? "store" : "load",
          (int)strcspn(shape, "."), shape, p->times, m->halves ? "true" : "false", line);
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
  const bool lines = e->options->entry_only && !pm_stands_in(e);
  pm_text t;
  pm_text_init(&t, e->arena);
  pm_putf(&t, "// %u registers %s tensor memory at a\nFN void %s(%su32* d, u32 a%s) {\n", p->words,
          store ? "to" : "from", name, store ? "const " : "", lines ? ", LINE" : "");
  if (lines || pm_stands_in(e)) {
    put_move(&t, m, k, store, lines ? ", line" : "");
    return kept(e, name, t.at);
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
  return kept(e, name, t.at);
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
    return kept(e, name, t.at);
  }
  pm_putf(&t, "  asm volatile(\"tcgen05.ld.red.sync.aligned.%s.%s%s%s.%s \"\n    \"", shape, how,
          abs ? ".abs" : "", d == PM_F32 ? ".NaN" : "", type);
  put_list(&t, 0, p->words);
  pm_putf(&t, ", %%%u, [%%%u];\"\n    : ", p->words, p->words + 1);
  put_words(&t, p, "\"=r\"(", ")");
  pm_put(&t, ", \"=r\"(*reduced) : \"r\"(a) : \"memory\");\n}\n");
  return kept(e, name, t.at);
}
