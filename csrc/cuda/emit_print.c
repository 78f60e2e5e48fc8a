/* Printing and checks: one lane prints scalars, and the lanes that hold the elements print arrays.
 *
 * A line is one printf. printf formats integers without a format specification. The device
 * functions print_float and print_int format everything else as text, as Python's format() would:
 * the shortest digits of a float, and all format specifications of the user. */
#include <stdio.h>
#include <stdlib.h>

#include "gen.h"

enum { MOST_INT = 48, MOST_FLOAT = 64 }; /* characters of a number without width and precision */

/* A field of a format: "{}", or "{:spec}" in Python's mini-language for numbers. */
typedef struct field {
  bool plain;
  char style[7]; /* as in device/print.cuh */
  int width, precision;
} field;

static int digits(const char **s) {
  int n = 0;
  while (**s >= '0' && **s <= '9') n = (int)pm_min(n * 10 + *(*s)++ - '0', 9999);
  return n;
}

static bool one_of(char c, const char *of) { return c && strchr(of, c); }

/* *s is the brace that opens it; afterwards, what follows the one that closes it. */
static field read_field(const char **s) {
  field f = {.precision = -1};
  const char *at = *s + 1;
  f.plain = *at == '}';
  strcpy(f.style, " >-...");
  at += *at == ':';
  const bool filled = at[0] && one_of(at[1], "<>^=");
  if (filled) f.style[0] = *at++;
  const bool aligned = one_of(*at, "<>^=");
  if (aligned) f.style[1] = *at++;
  if (one_of(*at, "-+ ")) f.style[2] = *at++;
  if (*at == '#') f.style[3] = *at++;
  if (*at == '0') {
    if (!filled) f.style[0] = '0';
    if (!aligned) f.style[1] = '=';
    at++;
  }
  f.width = digits(&at);
  if (one_of(*at, ",_")) f.style[4] = *at++;
  if (*at == '.') {
    at++;
    f.precision = digits(&at);
  }
  if (*at && *at != '}') f.style[5] = *at++;
  while (*at && *at != '}') at++;
  *s = *at ? at + 1 : at;
  return f;
}

/* A character of a C string. */
static void put_char(pm_text *out, char c) {
  if (c == '"' || c == '\\') {
    pm_putf(out, "\\%c", c);
  } else if ((unsigned char)c < ' ') {
    pm_putf(out, "\\%03o", (unsigned)(unsigned char)c);
  } else {
    pm_putn(out, &c, 1);
  }
}

static const char *c_string(pm_gen *e, const char *s) {
  pm_text out;
  pm_text_init(&out, e->arena);
  pm_put(&out, "");
  for (; *s; s++) put_char(&out, *s);
  return out.at;
}

/* A number as an argument of printf, whose format is *spec; text gets a place of its own. */
static const char *print_arg(pm_gen *e, pm_dtype t, const char *x, const field *f,
                             const char **spec) {
  const bool is_float = pm_is_float(t);
  if (!is_float && f->plain) {
    const bool is_signed = pm_dtypes[t].class == PM_CLASS_INT;
    *spec = t == PM_BOOL ? "%s" : is_signed ? "%lld" : "%llu";
    if (t == PM_BOOL) return pm_str(e, "((%s) ? \"True\" : \"False\")", x);
    return pm_str(e, "(%s)%s", is_signed ? "i64" : "u64", x);
  }
  const char *text = pm_unique(e, "text"), *style = c_string(e, f->style);
  *spec = "%s";
  if (!is_float && !one_of(f->style[5], "eEfFgG%")) {
    pm_line(e, "char %s[%d];", text, (int)pm_max(f->width, MOST_INT) + 1);
    return pm_str(e, "print_int(%s, (i64)%s, \"%s\", %d)", text, x, style, f->width);
  }
  const int room = (int)pm_max(f->width, MOST_FLOAT + pm_max(f->precision, 0)) + 1;
  const int bits = t == PM_F16 ? 11 : t == PM_BF16 ? 8 : is_float ? 24 : 53;
  const int least = t == PM_F16 ? -24 : t == PM_BF16 ? -133 : -149;
  pm_line(e, "char %s[%d];", text, 2 * room);
  return pm_str(e, "print_float(%s, (double)%s, \"%s\", %d, %d, %d, %d, %s + %d)", text,
                is_float ? pm_convert_text(e, t, PM_F32, x) : x, style, f->width, f->precision,
                bits, least, text, room);
}

/* The format as printf has it, in a C string; `specs` stand for the fields. */
static const char *print_format(pm_gen *e, const char *s, const char *const *specs, uint32_t n) {
  pm_text format;
  uint32_t k = 0;
  pm_text_init(&format, e->arena);
  pm_put(&format, "");
  while (*s) {
    if ((s[0] == '{' || s[0] == '}') && s[1] == s[0]) {
      pm_putn(&format, s, 1);
      s += 2;
    } else if (*s == '{' && k < n) {
      read_field(&s);
      pm_put(&format, specs[k++]);
    } else {
      if (*s == '%') pm_put(&format, "%");
      put_char(&format, *s++);
    }
  }
  return format.at;
}

static void read_fields(const char *s, field *fields, uint32_t n) {
  uint32_t k = 0;
  while (*s && k < n) {
    if ((s[0] == '{' || s[0] == '}') && s[1] == s[0]) s += 2;
    else if (*s == '{') fields[k++] = read_field(&s);
    else s++;
  }
}

static void put_index(pm_gen *e, pm_text *text, pm_text *args, const char *what, uint32_t n,
                      const char *(*at)(pm_gen *, uint32_t)) {
  pm_putf(text, "%s (", what);
  for (uint32_t d = 0; d < n; d++) {
    pm_put(text, d ? ", %d" : "%d");
    pm_putf(args, ", (i32)(%s)", at(e, d));
  }
  pm_put(text, n == 1 ? ",), " : "), ");
}

/* Who prints: "[grid point (0, 1), block (1,), thread 2] ". */
static const char *label(pm_gen *e, pm_opid op, pm_text *args) {
  pm_text text;
  pm_text_init(&text, e->arena);
  pm_put(&text, "");
  if (!*pm_attr(e->g, op, PM_ATTR_LABEL)) return text.at;
  pm_put(&text, "[");
  if (e->g->n_grid) put_index(e, &text, args, "grid point", e->g->n_grid, pm_grid_index);
  if (e->g->n_cluster) put_index(e, &text, args, "block", e->g->n_cluster, pm_cluster_index);
  pm_put(&text, "thread %d");
  pm_put(args, ", (i32)wg");
  if (e->warps) {
    pm_put(&text, ", warp %d");
    pm_put(args, ", (i32)warp");
  }
  pm_put(&text, "] ");
  return text.at;
}

/* Every element with its index: "[i, j]: number". */
static pm_code print_array(pm_gen *e, pm_opid op, const char *format) {
  const pm_val v = pm_in(e->g, op, 0);
  const pm_type *t = pm_typeof(e->g, v);
  const bool array = pm_is_array(e, v);
  const pm_layout *l = array ? pm_value_layout(e->g, v) : NULL;
  const char *spec, *i = "k";
  field f = {.plain = true};
  read_fields(format, &f, 1);
  pm_text where, args, test;
  pm_text_init(&where, e->arena);
  pm_text_init(&args, e->arena);
  pm_text_init(&test, e->arena);
  pm_put(&test, "");
  if (array) {
    const char *first = pm_first_copy(e, l), *stem = pm_coord_lines(e, l);
    i = pm_begin_unrolled(e, "r", pm_regs_of(e, v), 1);
    const char *valid = pm_valid(e, l, stem, i);
    if (first || valid)
      pm_putf(&test, "if (%s%s%s)", first ? first : "", first && valid ? " && " : "",
              valid ? valid : "");
  } else {
    pm_begin(e, "if (tid == 0) for (i32 k = 0; k < %lld; k++) {", (long long)pm_type_size(t));
  }
  const char *number = print_arg(e, (pm_dtype)t->dtype, pm_at(e, v, i), &f, &spec);
  const char *who = label(e, op, &args);
  int64_t below = pm_type_size(t);
  for (int d = 0; d < t->rank; d++) {
    below /= t->dim[d];
    pm_put(&where, d ? ", %d" : "[%d");
    if (array) {
      pm_putf(&args, ", %s", pm_coord_text(e, l, d, i));
    } else {
      pm_putf(&args, ", k / %lld %% %lld", (long long)below, (long long)t->dim[d]);
    }
  }
  pm_putf(&where, "]: %s", spec);
  const char *at = where.at;
  if (*test.at) pm_line(e, "%s", test.at);
  pm_line(e, "%sprintf(\"%s%s\\n\"%s, %s);", *test.at ? "  " : "", who,
          print_format(e, format, &at, 1), args.at, number);
  if (array) pm_end_unrolled(e, pm_regs_of(e, v), 1);
  else pm_end(e);
  return PM_OK;
}

pm_code pm_cuda_DEBUG_PRINT(pm_gen *e, pm_opid op) {
  const char *s = e->g->strings.at[*pm_attr(e->g, op, PM_ATTR_FORMAT)];
  const uint32_t n = pm_get(e->g, op)->n_in;
  pm_note(e, op, "debug_print");
  if (n == 1 && pm_typeof(e->g, pm_in(e->g, op, 0))->rank) return print_array(e, op, s);
  const char **specs = PM_NEW(e->arena, const char *, n + 1);
  field *fields = PM_NEW(e->arena, field, n + 1);
  pm_text args;
  pm_text_init(&args, e->arena);
  pm_put(&args, "");
  read_fields(s, fields, n);
  pm_begin(e, e->lane ? "{" : "if (%s) {", pm_first_lane(e));
  const char *who = label(e, op, &args);
  for (uint32_t k = 0; k < n; k++) {
    const pm_val v = pm_in(e->g, op, k);
    const pm_dtype t = pm_typeof(e->g, v)->dtype;
    pm_putf(&args, ", %s", print_arg(e, t, pm_scalar_of(e, v), &fields[k], &specs[k]));
  }
  pm_line(e, "printf(\"%s%s\\n\"%s);", who, print_format(e, s, specs, n), args.at);
  pm_end(e);
  return PM_OK;
}

pm_code pm_cuda_DEBUG_CHECK(pm_gen *e, pm_opid op) {
  const pm_op *o = pm_get(e->g, op);
  const char *message = e->g->strings.at[*pm_attr(e->g, op, PM_ATTR_FORMAT)];
  const char *file = o->file ? e->g->strings.at[o->file] : "";
  const char *holds = pm_scalar_of(e, pm_in(e->g, op, 0));
  const char *who = e->lane ? "" : pm_str(e, "%s && ", pm_first_lane(e));
  pm_note(e, op, "debug_check");
  pm_line(e, "if (%s!%s) check_failed(\"%s\", \"%s\", %u);", who, holds, c_string(e, message),
          c_string(e, file), o->line);
  return PM_OK;
}

pm_code pm_cuda_PRINT_LAYOUT(pm_gen *e, pm_opid op) { return (void)e, (void)op, PM_OK; }
