/* The ops of a block in order, and the text of values.
 *
 * Consecutive element-wise ops whose results are arrays with the same number of registers form a
 * run: they become the body of one unrolled loop over registers, and a result that only the run
 * reads is a variable of that loop. Scalar ops between them depend on no array, so they are printed
 * before the loop. */
#include "gen.h"

/* ---- lines ------------------------------------------------------------------------------- */

static void put_line(pm_gen *e, int indent, const char *fmt, va_list ap) {
  for (int k = 0; k < indent; k++) pm_put(&e->out, "  ");
  pm_vputf(&e->out, fmt, ap);
  pm_put(&e->out, "\n");
  e->line++;
}

void pm_line(pm_gen *e, const char *fmt, ...) {
  va_list ap;
  va_start(ap, fmt);
  put_line(e, e->indent, fmt, ap);
  va_end(ap);
}

void pm_begin(pm_gen *e, const char *fmt, ...) {
  va_list ap;
  va_start(ap, fmt);
  put_line(e, e->indent++, fmt, ap);
  va_end(ap);
}

void pm_end(pm_gen *e) {
  e->indent--;
  pm_line(e, "}");
}

/* An array of more elements a lane lies in local memory however its loops are written, and the time
 * of the compilers grows with the square of what is unrolled (48 s for 4096 elements). */
enum { MOST_UNROLLED = 512 };

void pm_unroll(pm_gen *e, int64_t n) {
  if (n > 1) pm_line(e, n > MOST_UNROLLED ? "#pragma unroll 8" : "#pragma unroll");
}

const char *pm_begin_unrolled(pm_gen *e, const char *var, int64_t n, int64_t step) {
  if (n <= step) return "0";
  pm_unroll(e, n / step);
  if (step == 1) {
    pm_begin(e, "for (int %s = 0; %s < %lld; %s++) {", var, var, (long long)n, var);
  } else {
    pm_begin(e, "for (int %s = 0; %s < %lld; %s += %lld) {", var, var, (long long)n, var,
             (long long)step);
  }
  return var;
}

void pm_end_unrolled(pm_gen *e, int64_t n, int64_t step) {
  if (n > step) pm_end(e);
}

static const char *base_name(const char *path) {
  const char *slash = strrchr(path, '/');
  return slash ? slash + 1 : path;
}

/* In a C string or comment of the generated text. */
static const char *escaped(pm_gen *e, const char *s) {
  pm_text t;
  pm_text_init(&t, e->arena);
  pm_put(&t, "");
  for (; *s; s++) {
    if (*s == '\\' || *s == '"') pm_putn(&t, "\\", 1);
    pm_putn(&t, (unsigned char)*s < ' ' ? "?" : s, 1);
  }
  return t.at;
}

void pm_note(pm_gen *e, pm_opid op, const char *what) {
  const pm_op *o = pm_get(e->g, op);
  if (o->line && (*what || o->line != e->noted)) {
    pm_line(e, "// %s%s%s:%u", what, *what ? "  " : "",
            escaped(e, base_name(e->g->strings.at[o->file])), o->line);
    e->noted = o->line;
  } else if (!o->line && *what) {
    pm_line(e, "// %s", what);
  }
  pm_place(e, op);
}

/* Takes a #line directive back that nothing follows; did it name the file? */
static bool take_back(pm_gen *e) {
  size_t at = e->out.n;
  if (!at) return false;
  while (--at > 0 && e->out.at[at - 1] != '\n') continue;
  if (strncmp(e->out.at + at, "#line ", 6)) return false;
  const bool named = e->out.at[e->out.n - 2] == '"';
  e->out.n = at;
  e->out.at[at] = 0;
  return named;
}

void pm_place(pm_gen *e, pm_opid op) {
  const pm_op *o = pm_get(e->g, op);
  if (!e->options->line_directives || !o->line) return;
  const char *file = e->g->strings.at[o->file];
  bool same_file = e->file && !strcmp(e->file, file);
  if (same_file && e->line == o->line) return;
  if (take_back(e)) same_file = false;
  if (same_file) {
    pm_putf(&e->out, "#line %u\n", o->line);
  } else {
    pm_putf(&e->out, "#line %u \"%s\"\n", o->line, escaped(e, file));
  }
  e->file = file;
  e->line = o->line;
}

pm_code pm_gen_fail(pm_gen *e, pm_opid op, pm_code code, const char *fmt, ...) {
  va_list ap;
  pm_text t;
  pm_text_init(&t, e->arena);
  va_start(ap, fmt);
  pm_vputf(&t, fmt, ap);
  va_end(ap);
  pm_fail(e->err, code, "%s: %s", pm_ops[pm_get(e->g, op)->code].text, t.at);
  pm_err_op(e->err, e->g, op);
  return code;
}

/* ---- names ------------------------------------------------------------------------------- */

static const char *issue(pm_gen *e, const char *stem, uint32_t number, bool local) {
  const struct pm_issued x = {pm_str(e, "%s_%u", stem, number), (uint32_t)strlen(stem), local};
  pm_vec_push(e->arena, &e->issued, x);
  return x.text;
}

const char *pm_unique(pm_gen *e, const char *stem) { return issue(e, stem, ++e->next_name, false); }

const char *pm_identifier(pm_gen *e, const char *s) {
  enum { MAX_NAME = 40 };
  pm_text t;
  pm_text_init(&t, e->arena);
  if (!*s || (*s >= '0' && *s <= '9')) pm_put(&t, "v");
  for (; *s && t.n < MAX_NAME; s++) {
    const bool ok = (*s >= '0' && *s <= '9') || (*s >= 'a' && *s <= 'z') ||
                    (*s >= 'A' && *s <= 'Z') || *s == '_';
    pm_putn(&t, ok ? s : "_", 1);
  }
  return t.at;
}

const char *pm_name_of(pm_gen *e, pm_val v) {
  const char *stem = pm_identifier(e, e->g->strings.at[pm_value_of(e->g, v)->name]);
  if (e->named[v]) return pm_unique(e, stem); /* declared once more */
  e->named[v] = true;
  return issue(e, stem, e->number[v], true);
}

const char *pm_cpp_type(pm_dtype t) { return pm_dtypes[t].cuda; }

static const char *float_literal(pm_gen *e, double x) {
  const float f = (float)x;
  uint32_t bits;
  memcpy(&bits, &f, 4);
  if (f != f || f - f != 0) return pm_str(e, "f32_bits(0x%08xu)", bits);
  const char *s = pm_str(e, "%.9g", (double)f);
  return pm_str(e, strpbrk(s, ".e") ? "%sf" : "%s.0f", s);
}

const char *pm_literal(pm_gen *e, pm_dtype t, pm_scalar v) {
  const char *cpp = pm_cpp_type(t);
  const long long i = v.i;
  if (pm_is_narrow_float(t)) {
    const int bits = pm_f32_to_narrow(t, (float)v.f);
    return pm_str(e, "%s{0x%0*x /* %g */}", cpp, pm_dtypes[t].bits / 4, bits, v.f);
  }
  if (pm_is_float(t)) return float_literal(e, v.f);
  if (pm_dtypes[t].class == PM_CLASS_BOOL) return v.i ? "true" : "false";
  if (pm_dtypes[t].bits < 32) return pm_str(e, "(%s)%lld", cpp, i);
  if (pm_dtypes[t].class == PM_CLASS_UINT)
    return pm_str(e, "%lluu", (unsigned long long)(uint32_t)i);
  return i == INT32_MIN ? "(-2147483647 - 1)" : pm_str(e, "%lld", i);
}

/* ---- slots ------------------------------------------------------------------------------- */

void pm_bind(pm_gen *e, pm_val v, const char *text, pm_form form) {
  e->slot[v] = (pm_slot){text, (uint8_t)form};
}

void pm_alias(pm_gen *e, pm_val v, pm_val of) {
  pm_at(e, of, "0"); /* constants get their slot at first use */
  e->slot[v] = e->slot[of];
}

const char *pm_at(pm_gen *e, pm_val v, const char *reg) {
  pm_slot *s = &e->slot[v];
  const pm_value *val = pm_value_of(e->g, v);
  if (s->form == PM_FORM_NONE && val->def && pm_has_attr(e->g, val->def, PM_ATTR_VALUE)) {
    const int64_t word = *pm_attr(e->g, val->def, PM_ATTR_VALUE);
    pm_scalar x = {.i = word};
    if (pm_is_float(val->type.dtype)) memcpy(&x.f, &word, sizeof word);
    pm_bind(e, v, pm_literal(e, val->type.dtype, x), PM_FORM_SCALAR);
  }
  return s->form == PM_FORM_ARRAY ? pm_str(e, "%s[%s]", s->text, reg) : s->text;
}

bool pm_is_array(const pm_gen *e, pm_val v) { return e->slot[v].form == PM_FORM_ARRAY; }

bool pm_wants_array(const pm_gen *e, pm_val v) {
  const pm_value *val = pm_value_of(e->g, v);
  return val->type.kind == PM_ARRAY && val->type.rank && val->layout &&
         pm_value_layout(e->g, v)->kind != PM_SPLAT;
}

int64_t pm_regs_of(const pm_gen *e, pm_val v) {
  return pm_wants_array(e, v) ? pm_layout_regs(pm_value_layout(e->g, v)) : 1;
}

const char *pm_declare(pm_gen *e, pm_val v, pm_val named_like) {
  if (e->into[v]) {
    pm_bind(e, v, e->into[v], PM_FORM_ARRAY);
    return e->into[v];
  }
  const char *name = pm_name_of(e, named_like);
  const char *type = pm_cpp_type(pm_typeof(e->g, v)->dtype);
  if (pm_wants_array(e, v)) {
    pm_line(e, "%s %s[%lld];", type, name, (long long)pm_regs_of(e, v));
    pm_bind(e, v, name, PM_FORM_ARRAY);
  } else {
    pm_line(e, "%s %s;", type, name);
    pm_bind(e, v, name, PM_FORM_SCALAR);
  }
  return name;
}

void pm_assign(pm_gen *e, pm_val to, pm_val from) {
  if (!pm_is_array(e, to)) {
    pm_line(e, "%s = %s;", e->slot[to].text, pm_at(e, from, "0"));
    return;
  }
  const int64_t n = pm_regs_of(e, to);
  pm_unroll(e, n);
  if (n > 1) {
    pm_line(e, "for (int r = 0; r < %lld; r++) %s[r] = %s;", (long long)n, e->slot[to].text,
            pm_at(e, from, "r"));
  } else {
    pm_line(e, "%s[0] = %s;", e->slot[to].text, pm_at(e, from, "0"));
  }
}

/* ---- runs of element-wise ops ------------------------------------------------------------ */

bool pm_is_elementwise(const pm_graph *g, pm_opid op) {
  const int code = pm_get(g, op)->code, rule = pm_ops[code].layout;
  const bool source = rule == PM_LAY_SPLAT || rule == PM_LAY_FREE;
  if (source && !pm_is_pure(code)) return false; /* no expression: NEXT_TILE ... */
  return rule == PM_LAY_POINTWISE || rule == PM_LAY_SPLAT || rule == PM_LAY_FREE ||
         rule == PM_LAY_BROADCAST;
}

/* Does the op compute an array, rather than one number for all elements? */
static bool makes_array(pm_gen *e, pm_opid op, const bool *in_run) {
  const pm_op *o = pm_get(e->g, op);
  if (!pm_wants_array(e, o->out)) return false;
  if (o->code == PM_OP_IOTA) return true;
  for (uint32_t k = 0; k < o->n_in; k++) {
    const pm_val v = pm_in(e->g, op, k);
    if (pm_is_array(e, v) || (in_run && in_run[v])) return true;
  }
  return false;
}

/* Conversions of several elements in a few instructions: loops of their own. */
typedef struct group_convert {
  const char *fn;   /* the device function; NULL: element by element */
  int64_t n, from;  /* elements of a call; registers of `in`, or bytes, for them */
  pm_val in, bytes; /* elements of 4 bits: the array of their bytes, if there is one */
} group_convert;

/* The bytes that hold the elements of 4 bits in array v, two each; 0: they lie elsewhere, too. */
static pm_val packed_source(pm_gen *e, pm_val v) {
  const pm_opid def = pm_value_of(e->g, v)->def;
  return def && pm_get(e->g, def)->code == PM_OP_UNPACK ? pm_in(e->g, def, 0) : 0;
}

/* f32 to 16 or 8 bits, and 8 bits to more, two at a time in one instruction; small integers by
 * words (device/widen.cuh). */
static group_convert find_group_convert(pm_gen *e, pm_opid op) {
  const pm_op *o = pm_get(e->g, op);
  group_convert c = {0};
  if (o->code != PM_OP_CONVERT) return c;
  c.in = pm_in(e->g, op, 0);
  const pm_dtype from = pm_typeof(e->g, c.in)->dtype, to = pm_typeof(e->g, o->out)->dtype;
  const char *short_name = pm_dtypes[from].short_name;
  const bool half = pm_is_float(to) && pm_dtypes[to].bits == 16, wide = half || to == PM_F32;
  const int group = pm_dtypes[from].group, bits = pm_dtypes[from].bits;
  const char *fn = NULL;
  if (from == PM_F32 && pm_is_float(to) && pm_dtypes[to].group > 1) {
    fn = pm_str(e, "cvt_%sx2", pm_cpp_type(to));
    c.n = c.from = pm_dtypes[to].group;
  } else if (group > 1 && (bits == 8 ? wide : bits < 8 && half)) {
    fn = pm_str(e, "cvt_from_%sx%d", short_name, group);
    c.n = group;
    c.from = group * bits / 8; /* bytes */
    if (bits < 8) c.bytes = packed_source(e, c.in);
  }
  if (fn && pm_regs_of(e, o->out) % c.n == 0) c.fn = fn;
  return c;
}

static bool is_group_convert(pm_gen *e, pm_opid op) { return find_group_convert(e, op).fn != NULL; }

static void emit_group_convert(pm_gen *e, pm_opid op) {
  const pm_val out = pm_get(e->g, op)->out;
  const group_convert c = find_group_convert(e, op);
  const long long n = pm_regs_of(e, out), by = c.n, from = c.from;
  pm_note(e, op, "");
  if (e->only_words[out]) {
    const char *words = pm_declare_words(e, out);
    pm_unroll(e, n);
    pm_line(e, "for (int r = 0; r < %lld; r += 2) %s[r / 2] = cvt_rn_%sx2(%s, %s);", n, words,
            pm_cpp_type(pm_typeof(e->g, out)->dtype), pm_at(e, c.in, "r"), pm_at(e, c.in, "r + 1"));
    return;
  }
  const char *bytes = NULL;
  if (from < by && !c.bytes) { /* the compiler finds those that they were taken from */
    bytes = pm_unique(e, "bytes");
    pm_line(e, "u8 %s[%lld];", bytes, n / 2);
    pm_unroll(e, n);
    pm_line(e, "for (int r = 0; r < %lld; r++) %s[r] = pack_4(bits_of(%s), bits_of(%s));", n / 2,
            bytes, pm_at(e, c.in, "2 * r"), pm_at(e, c.in, "2 * r + 1"));
  }
  const char *name = pm_declare(e, out, out);
  pm_unroll(e, n);
  if (bytes) {
    pm_line(e, "for (int r = 0; r < %lld; r += %lld) %s(&%s[r], &%s[r / 2]);", n, by, c.fn, name,
            bytes);
  } else if (by == 2) {
    pm_line(e, "for (int r = 0; r < %lld; r += 2) %s(&%s[r], %s, %s);", n, c.fn, name,
            pm_at(e, c.in, "r"), pm_at(e, c.in, "r + 1"));
  } else {
    pm_line(e, "for (int r = 0; r < %lld; r += %lld) %s(&%s[r], &%s);", n, by, c.fn, name,
            from == by ? pm_at(e, c.in, "r") : pm_at(e, c.bytes, "r / 2"));
  }
}

/* Sums and products of floats of 16 bits: the function that makes two at a time, or NULL. */
static const char *pair_function(pm_gen *e, pm_opid op) {
  const pm_op *o = pm_get(e->g, op);
  const char *name = o->code == PM_OP_ADD   ? "add_x2"
                     : o->code == PM_OP_SUB ? "sub_x2"
                     : o->code == PM_OP_MUL ? "mul_x2"
                                            : NULL;
  if (!name || !pm_wants_array(e, o->out) || pm_regs_of(e, o->out) % 2) return NULL;
  const pm_dtype t = pm_typeof(e->g, o->out)->dtype;
  return t == PM_F16 || t == PM_BF16 ? name : NULL;
}

static void emit_pairs(pm_gen *e, pm_opid op) {
  const pm_op *o = pm_get(e->g, op);
  const pm_val x = pm_in(e->g, op, 0), y = pm_in(e->g, op, 1);
  pm_note(e, op, "");
  const char *name = pm_declare(e, o->out, o->out);
  pm_unroll(e, pm_regs_of(e, o->out));
  pm_line(e, "for (int r = 0; r < %lld; r += 2)", (long long)pm_regs_of(e, o->out));
  pm_line(e, "  %s(&%s[r], %s, %s, %s, %s);", pair_function(e, op), name, pm_at(e, x, "r"),
          pm_at(e, x, "r + 1"), pm_at(e, y, "r"), pm_at(e, y, "r + 1"));
}

/* Words of an array that nothing may move across: one statement takes them all. */
static bool is_array_barrier(pm_gen *e, pm_opid op) {
  const pm_op *o = pm_get(e->g, op);
  if (o->code != PM_OP_OPT_BARRIER || !pm_wants_array(e, o->out)) return false;
  const int bits = (int)pm_dtypes[pm_typeof(e->g, o->out)->dtype].bits;
  return bits == 32 || (bits == 16 && pm_regs_of(e, o->out) % 2 == 0);
}

/* Is this the only use of an array that was made in the same block? */
static bool ends_here(const pm_gen *e, pm_opid op, pm_val v) {
  const pm_opid def = pm_value_of(e->g, v)->def;
  return def && e->uses[v] == 1 && pm_is_array(e, v) &&
         pm_get(e->g, def)->parent == pm_get(e->g, op)->parent;
}

static void emit_array_barrier(pm_gen *e, pm_opid op) {
  enum { MOST = 128 };
  const pm_val out = pm_get(e->g, op)->out, in = pm_in(e->g, op, 0);
  const pm_dtype t = pm_typeof(e->g, out)->dtype;
  const int64_t n = pm_regs_of(e, out);
  pm_note(e, op, "optimization_barrier");
  if (ends_here(e, op, in)) {
    pm_alias(e, out, in);
  } else {
    pm_declare(e, out, out);
    pm_assign(e, out, in);
  }
  const char *name = e->slot[out].text;
  if (pm_dtypes[t].bits == 16) {
    pm_line(e, "pin_pairs<%s, %lld>(%s);", pm_cpp_type(t), (long long)n, name);
    return;
  }
  for (int64_t k = 0; k < n; k += MOST) {
    const char *pin = pm_ptx_pin(e, t, pm_min(MOST, n - k));
    pm_line(e, "%s(&%s[%lld]);", pin, name, (long long)k);
  }
}

static pm_code emit_expr(pm_gen *e, pm_opid op);

bool pm_is_view(const pm_graph *g, pm_opid op) { return pm_makes_view(pm_get(g, op)->code); }

bool pm_is_scalar_op(pm_gen *e, pm_opid op) {
  return pm_is_view(e->g, op) || (pm_is_elementwise(e->g, op) && !makes_array(e, op, NULL));
}

/* Does the text of a scalar without a name stand where its one use is? C++ gives it the op's dtype
 * without a variable; what the use computes is printed once. */
static bool is_inlined(pm_gen *e, pm_opid op) {
  enum { LONGEST = 40 };
  const pm_op *o = pm_get(e->g, op);
  const pm_value *v = pm_value_of(e->g, o->out);
  const bool flag = v->type.dtype == PM_BOOL;
  if (v->name || v->type.rank || e->uses[o->out] != 1 || strlen(e->expr) > LONGEST) return false;
  if (pm_ops[o->code].layout != PM_LAY_POINTWISE || o->code == PM_OP_OPT_BARRIER) return false;
  const pm_op *user = pm_get(e->g, e->user[o->out]);
  if (user->parent != o->parent) return false;
  if (user->code == PM_OP_IF) return true;
  for (uint32_t k = 0; k < o->n_in; k++) {
    if (pm_typeof(e->g, pm_in(e->g, op, k))->dtype != PM_I32) return false;
  }
  return (flag || v->type.dtype == PM_I32) && pm_ops[user->code].layout == PM_LAY_POINTWISE &&
         user->code != PM_OP_OPT_BARRIER && !pm_typeof(e->g, user->out)->rank;
}

const char *pm_condition(pm_gen *e, pm_val v) {
  const char *text = pm_scalar_of(e, v);
  return *text == '(' ? pm_str(e, "%.*s", (int)strlen(text) - 2, text + 1) : text;
}

pm_code pm_gen_scalar(pm_gen *e, pm_opid op) {
  const pm_op *o = pm_get(e->g, op);
  if (pm_has_attr(e->g, op, PM_ATTR_VALUE) || pm_is_view(e->g, op))
    return PM_OK; /* where it is used */
  if (pm_only_moves(o->code) || o->code == PM_OP_MULTIPLE_OF) {
    pm_alias(e, o->out, pm_in(e->g, op, 0));
    return PM_OK;
  }
  PM_TRY(emit_expr(e, op));
  if (is_inlined(e, op)) {
    pm_bind(e, o->out, pm_str(e, "(%s)", e->expr), PM_FORM_SCALAR);
    return PM_OK;
  }
  const char *name = pm_name_of(e, o->out);
  pm_place(e, op);
  pm_line(e, "const %s %s = %s;", pm_cpp_type(pm_typeof(e->g, o->out)->dtype), name, e->expr);
  pm_bind(e, o->out, name, PM_FORM_SCALAR);
  return PM_OK;
}

/* The run that begins with an array op at position `first`; returns behind its end in *next. */
static pm_code emit_run(pm_gen *e, pm_blk block, uint32_t first, uint32_t *next) {
  const pm_graph *g = e->g;
  const pm_block *b = &g->blocks.at[block];
  const int64_t n = pm_regs_of(e, pm_get(g, b->ops.at[first])->out);
  bool *in_run = PM_NEW(e->arena, bool, g->values.n);
  uint32_t *reads = PM_NEW(e->arena, uint32_t, g->values.n);
  PM_VEC(pm_opid) run = {0};
  uint32_t k = first;
  for (; k < b->ops.n; k++) {
    const pm_opid op = b->ops.at[k];
    if (pm_is_view(g, op) || (pm_is_elementwise(g, op) && !makes_array(e, op, in_run))) {
      PM_TRY(pm_gen_scalar(e, op));
      continue;
    }
    if (!pm_is_elementwise(g, op) || is_group_convert(e, op) || is_array_barrier(e, op)) break;
    if (pair_function(e, op)) break;
    if (pm_rule_of(g, op) == PM_LAY_BROADCAST && in_run[pm_in(g, op, 0)]) break;
    if (pm_regs_of(e, pm_get(g, op)->out) != n) break;
    pm_vec_push(e->arena, &run, op);
    in_run[pm_get(g, op)->out] = true;
    for (uint32_t i = 0; i < pm_get(g, op)->n_in; i++) reads[pm_in(g, op, i)]++;
  }
  *next = k;

  e->reg = n == 1 ? "0" : "r";
  pm_note(e, run.at[0], "");
  const char **text = PM_NEW(e->arena, const char *, run.n);
  bool *stays = PM_NEW(e->arena, bool, run.n);
  for (uint32_t i = 0; i < run.n; i++) {
    const pm_val out = pm_get(g, run.at[i])->out;
    stays[i] = reads[out] != e->uses[out];
    PM_TRY(emit_expr(e, run.at[i]));
    text[i] = e->expr;
    if (stays[i]) {
      pm_declare(e, out, out);
    } else {
      pm_bind(e, out, pm_name_of(e, out), PM_FORM_SCALAR);
    }
  }
  pm_begin_unrolled(e, "r", n, 1);
  for (uint32_t i = 0; i < run.n; i++) {
    const pm_val out = pm_get(g, run.at[i])->out;
    pm_place(e, run.at[i]);
    if (stays[i]) {
      pm_line(e, "%s[%s] = %s;", e->slot[out].text, e->reg, text[i]);
    } else {
      pm_line(e, "const %s %s = %s;", pm_cpp_type(pm_typeof(g, out)->dtype), e->slot[out].text,
              text[i]);
    }
  }
  pm_end_unrolled(e, n, 1);
  return PM_OK;
}

/* ---- dispatch ---------------------------------------------------------------------------- */

typedef pm_code (*emitter)(pm_gen *e, pm_opid op);
static const emitter emitters[PM_OP_COUNT] = {
#define PM_OP(id, text, in, names, out, regions, attrs, type, layout, effects, participants, \
              known_to, completion, warp, needs, doc)                                        \
  [PM_OP_##id] = pm_cuda_##id,
#include "../ir/ops.def"
#undef PM_OP
};

static pm_code emit_expr(pm_gen *e, pm_opid op) { return emitters[pm_get(e->g, op)->code](e, op); }

pm_code pm_gen_op(pm_gen *e, pm_opid op) {
  pm_check_indices(e, op);
  return pm_is_scalar_op(e, op) ? pm_gen_scalar(e, op) : emit_expr(e, op);
}

pm_code pm_gen_block(pm_gen *e, pm_blk block) {
  const pm_block *b = &e->g->blocks.at[block];
  for (uint32_t k = 0; k < pm_n_ops(e->g, block);) {
    const pm_opid op = b->ops.at[k];
    uint32_t behind = k;
    if (!e->lane) PM_TRY(pm_gen_region(e, block, k, &behind));
    if (behind > k) {
      k = behind;
    } else if (pm_is_scalar_op(e, op) || !pm_is_elementwise(e->g, op)) {
      PM_TRY(pm_gen_op(e, op));
      k++;
    } else if (is_array_barrier(e, op)) {
      emit_array_barrier(e, op);
      k++;
    } else if (is_group_convert(e, op)) {
      emit_group_convert(e, op);
      k++;
    } else if (pair_function(e, op)) {
      emit_pairs(e, op);
      k++;
    } else {
      PM_TRY(emit_run(e, block, k, &k));
    }
  }
  return PM_OK;
}

/* ---- scratch ----------------------------------------------------------------------------- */

int64_t pm_scratch_bytes(const pm_gen *e) { return e->g->scratch_bytes / e->g->n_threads; }

const char *pm_scratch(pm_gen *e) {
  if (e->g->n_threads == 1) return pm_str(e, "smem + %lld", (long long)e->g->scratch_offset);
  return pm_str(e, "smem + %lld + wg * %lld", (long long)e->g->scratch_offset,
                (long long)pm_scratch_bytes(e));
}

void pm_end_of_one_lane(pm_gen *e, const char *x) {
  pm_line(e, "st_shared<i32, 1>(%s, &%s);", pm_scratch(e), x);
  pm_end(e);
  pm_line(e, PM_WARPGROUP_SYNC);
  pm_line(e, "ld_shared<i32, 1>(&%s, %s);", x, pm_scratch(e));
  pm_line(e, PM_WARPGROUP_SYNC);
}
