/* Services for all emitters: lines, names, the text of values, the thread's scratch, and what they
 * ask about single ops. Nothing here prints an op. */
#include "gen.h"

/* ---- lines ------------------------------------------------------------------------------------
 */

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
  if (op == e->said) {
    e->said = 0;
  } else if (o->line && (*what || o->line != e->noted)) {
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
  /* What the compiler would count to by itself is told: the emulated machine does not count. */
  if (same_file && e->line == o->line && e->placed == o->line) return;
  if (take_back(e)) same_file = false;
  if (same_file) {
    pm_putf(&e->out, "#line %u\n", o->line);
  } else {
    pm_putf(&e->out, "#line %u \"%s\"\n", o->line, escaped(e, file));
  }
  e->file = file;
  e->line = e->placed = o->line;
}

pm_code pm_gen_fail(pm_gen *e, pm_opid op, pm_code code, const char *fmt, ...) {
  va_list ap;
  pm_text t;
  pm_text_init(&t, e->arena);
  va_start(ap, fmt);
  pm_vputf(&t, fmt, ap);
  va_end(ap);
  pm_fail(e->err, code, "%s: %s", pm_op_name(pm_get(e->g, op)->code), t.at);
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

void pm_declare_as(pm_gen *e, pm_val v, pm_val named_like, pm_val init) {
  if (pm_wants_array(e, v) || e->into[v]) {
    pm_declare(e, v, named_like);
    pm_assign(e, v, init);
    return;
  }
  const char *name = pm_name_of(e, named_like), *type = pm_cpp_type(pm_typeof(e->g, v)->dtype);
  pm_line(e, "%s %s = %s;", type, name, pm_at(e, init, "0"));
  pm_bind(e, v, name, PM_FORM_SCALAR);
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

/* ---- ops --------------------------------------------------------------------------------- */

bool pm_is_elementwise(const pm_graph *g, pm_opid op) {
  const int code = pm_get(g, op)->code, rule = pm_ops[code].layout;
  const bool source = rule == PM_LAY_SPLAT || rule == PM_LAY_FREE;
  if (source && !pm_is_pure(code)) return false; /* no expression: NEXT_TILE ... */
  return rule == PM_LAY_POINTWISE || rule == PM_LAY_SPLAT || rule == PM_LAY_FREE ||
         rule == PM_LAY_BROADCAST;
}

bool pm_is_view(const pm_graph *g, pm_opid op) { return pm_makes_view(pm_get(g, op)->code); }

bool pm_orders_tensor_core(const pm_graph *g, pm_val barrier) {
  return *pm_attr(g, pm_value_of(g, pm_view_base(g, barrier))->def, PM_ATTR_TENSOR_CORE);
}

static pm_layout *rank0_layout(pm_gen *e) {
  pm_layout *l = PM_NEW(e->arena, pm_layout, 1);
  l->kind = PM_SPLAT;
  return l;
}

const pm_layout *pm_layout_in(pm_gen *e, pm_val v) {
  return pm_value_of(e->g, v)->layout ? pm_value_layout(e->g, v) : rank0_layout(e);
}
const char *pm_size_text(pm_gen *e, uint32_t size) {
  if (!e->size_name[size]) {
    const char *name = e->g->strings.at[e->g->sizes.at[size].name];
    e->size_name[size] = pm_unique(e, *name ? pm_identifier(e, name) : "size");
  }
  return e->size_name[size];
}
