/* Printing and checks: of scalars by one lane, of arrays by the lanes that hold the elements. */
#include "gen.h"

/* text of a number for printf, whose format is *spec */
static const char *print_arg(pm_gen *e, pm_dtype t, const char *x, const char **spec) {
  if (pm_is_float(t)) {
    *spec = "%f";
    return pm_str(e, "(double)%s", pm_convert_text(e, t, PM_F32, x));
  }
  const bool is_signed = pm_dtypes[t].class == PM_CLASS_INT;
  *spec = is_signed ? "%lld" : "%llu";
  return pm_str(e, "(%s)%s", is_signed ? "i64" : "u64", x);
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

/* The format as printf has it, in a C string; `specs` stand for the fields. */
static const char *print_format(pm_gen *e, const char *s, const char *const *specs, uint32_t n) {
  pm_text format;
  uint32_t k = 0;
  pm_text_init(&format, e->arena);
  pm_put(&format, "");
  for (; *s; s++) {
    if (s[0] == '{' && s[1] == '}' && k < n) {
      pm_put(&format, specs[k++]);
      s++;
    } else if ((s[0] == '{' || s[0] == '}') && s[1] == s[0]) {
      pm_putn(&format, s++, 1);
    } else if (*s == '%') {
      pm_put(&format, "%%");
    } else {
      put_char(&format, *s);
    }
  }
  return format.at;
}

/* Every element behind its index: "[i, j]: number". */
static pm_code print_array(pm_gen *e, pm_opid op, const char *format) {
  const pm_val v = pm_in(e->g, op, 0);
  const pm_type *t = pm_typeof(e->g, v);
  const bool array = pm_is_array(e, v);
  const pm_layout *l = array ? pm_value_layout(e->g, v) : NULL;
  const char *spec, *i = "k";
  if (array) {
    const char *first = pm_first_copy(e, l), *stem = pm_coord_lines(e, l);
    i = pm_begin_unrolled(e, "r", pm_regs_of(e, v), 1);
    const char *valid = pm_valid(e, l, stem, i);
    if (first || valid)
      pm_line(e, "if (%s%s%s)", first ? first : "", first && valid ? " && " : "",
              valid ? valid : "");
  } else {
    pm_line(e, "if (tid == 0) for (i32 k = 0; k < %lld; k++)", (long long)pm_type_size(t));
  }
  const char *number = print_arg(e, (pm_dtype)t->dtype, pm_at(e, v, i), &spec);
  pm_text where, args;
  pm_text_init(&where, e->arena);
  pm_text_init(&args, e->arena);
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
  pm_line(e, "  printf(\"%s\\n\"%s, %s);", print_format(e, format, &at, 1), args.at, number);
  if (array) pm_end_unrolled(e, pm_regs_of(e, v), 1);
  return PM_OK;
}

pm_code pm_cuda_DEBUG_PRINT(pm_gen *e, pm_opid op) {
  const char *s = e->g->strings.at[*pm_attr(e->g, op, PM_ATTR_FORMAT)];
  const uint32_t n = pm_get(e->g, op)->n_in;
  pm_note(e, op, "debug_print");
  if (n == 1 && pm_typeof(e->g, pm_in(e->g, op, 0))->rank) return print_array(e, op, s);
  const char **specs = PM_NEW(e->arena, const char *, n + 1);
  pm_text args;
  pm_text_init(&args, e->arena);
  pm_put(&args, "");
  for (uint32_t k = 0; k < n; k++) {
    const pm_val v = pm_in(e->g, op, k);
    const pm_dtype t = pm_typeof(e->g, v)->dtype;
    pm_putf(&args, ", %s", print_arg(e, t, pm_scalar_of(e, v), &specs[k]));
  }
  const char *format = print_format(e, s, specs, n);
  if (e->lane) {
    pm_line(e, "printf(\"%s\\n\"%s);", format, args.at);
  } else {
    pm_line(e, "if (%s) printf(\"%s\\n\"%s);", pm_first_lane(e), format, args.at);
  }
  return PM_OK;
}

pm_code pm_cuda_DEBUG_CHECK(pm_gen *e, pm_opid op) {
  const pm_op *o = pm_get(e->g, op);
  const char *message = e->g->strings.at[*pm_attr(e->g, op, PM_ATTR_FORMAT)];
  const char *file = o->file ? e->g->strings.at[o->file] : "";
  const char *holds = pm_scalar_of(e, pm_in(e->g, op, 0));
  const char *who = e->lane ? "" : pm_str(e, "%s && ", pm_first_lane(e));
  pm_note(e, op, "debug_check");
  pm_line(e, "if (%s!%s) check_failed(\"%s\", \"%s\", %u);", who, holds,
          c_string(e, message), c_string(e, file), o->line);
  return PM_OK;
}

pm_code pm_cuda_PRINT_LAYOUT(pm_gen *e, pm_opid op) { return (void)e, (void)op, PM_OK; }
