/* Reading the text form (docs/graph-text.md): recursive descent over the bytes, without tokens.
 *
 * The builder creates the ops (pm_emit, pm_open), so operands, attributes and types are checked as
 * for a traced kernel, and the types in the text must agree with the rules of the ops. The whole
 * graph is verified at the end. Values are found by their full label (`%acc_12`); a label is
 * defined once and is visible to the end of its region. The text may be any bytes of any length:
 * every failure is a message with line and column, and nesting is limited, which limits the C
 * stack. */
#include <errno.h>
#include <inttypes.h>
#include <locale.h>
#include <stdlib.h>

#include "layout.h"
#include "rules.h"
#include "sizes.h"

enum { MAX_NESTING = 64, MAX_LABEL = 4096 };

typedef struct slice {
  const char *at;
  size_t n;
} slice;

typedef struct symbol {
  slice label;
  pm_val val; /* 0: its region is closed */
} symbol;

typedef struct parser {
  pm_graph *g;
  const char *text, *at, *end;
  pm_err *err;
  PM_VEC(symbol) symbols;          /* in order of definition; 0 is none */
  PM_VEC(uint32_t) slots;          /* hash table over symbols, a power of two */
  PM_VEC(int32_t) alias;           /* per output */
  PM_VEC(const int64_t *) strides; /* per operand and output */
  int depth;
} parser;

/* An op as the text gives it, before it is made. */
typedef struct statement {
  const char *at;
  pm_opcode code;
  PM_VEC(slice) results;
  PM_VEC(pm_type) types;
  PM_VEC(slice) layouts; /* of the results; empty: none */
  PM_VEC(pm_val) in;
  pm_attr_arg attrs[PM_MAX_ATTRS];
  uint32_t n_attrs;
  const char *bits, *layout; /* where attributes stand that need the result's type */
  uint32_t file, line;
} statement;

#define TRY(call)              \
  do {                         \
    pm_code try_rc = (call);   \
    if (try_rc) return try_rc; \
  } while (0)
#define FAIL(p, where, ...) return fail_at((p), (where), pm_printf((p)->g->arena, __VA_ARGS__))

static pm_code parse_block(parser *p, pm_blk block, bool with_args);

/* ---- errors ------------------------------------------------------------------------------- */

static pm_code fail_at(parser *p, const char *where, const char *message) {
  uint32_t line = 1, column = 1;
  for (const char *s = p->text; s < where; s++) {
    column = *s == '\n' ? 1 : column + 1;
    line += *s == '\n';
  }
  return pm_fail(p->err, PM_E_VALUE, "graph text, line %u, column %u: %s", line, column, message);
}

/* Put line and column before what the builder says. */
static pm_code builder_failed(parser *p, const char *where) {
  pm_code code = p->err->code;
  fail_at(p, where, p->err->text);
  return p->err->code = code == PM_E_INTERNAL ? PM_E_VALUE : code;
}

/* ---- characters and words ----------------------------------------------------------------- */

static void skip(parser *p) {
  while (p->at < p->end) {
    if (*p->at == ' ' || *p->at == '\t' || *p->at == '\n' || *p->at == '\r') {
      p->at++;
    } else if (p->end - p->at >= 2 && p->at[0] == '/' && p->at[1] == '/') {
      while (p->at < p->end && *p->at != '\n') p->at++;
    } else {
      return;
    }
  }
}

/* Stays where it is if not: a place may stand before what comes next. */
static bool next_is(parser *p, char c) {
  const char *from = p->at;
  skip(p);
  if (p->at < p->end && *p->at == c) return true;
  p->at = from;
  return false;
}

static bool eat(parser *p, char c) {
  if (!next_is(p, c)) return false;
  p->at++;
  return true;
}

static pm_code expect(parser *p, char c) {
  if (eat(p, c)) return PM_OK;
  skip(p);
  FAIL(p, p->at, "expected '%c'", c);
}

static bool is_digit(char c) { return c >= '0' && c <= '9'; }

static bool is_word_char(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || is_digit(c) || c == '_' ||
         (unsigned char)c >= 0x80;
}

static slice read_word(parser *p) {
  skip(p);
  slice s = {p->at, 0};
  while (p->at < p->end && is_word_char(*p->at)) p->at++;
  s.n = (size_t)(p->at - s.at);
  return s;
}

static bool is_text(slice s, const char *text) {
  return s.n == strlen(text) && !memcmp(s.at, text, s.n);
}

static int shown(slice s) { return (int)(s.n < 100 ? s.n : 100); }

static bool eat_word(parser *p, const char *word) {
  const char *from = p->at;
  if (is_text(read_word(p), word)) return true;
  p->at = from;
  return false;
}

static pm_code read_int(parser *p, int64_t *out) {
  skip(p);
  const char *from = p->at;
  char digits[24];
  size_t n = 0;
  if (p->at < p->end && *p->at == '-') digits[n++] = *p->at++;
  while (p->at < p->end && is_digit(*p->at) && n < sizeof digits - 1) digits[n++] = *p->at++;
  digits[n] = 0;
  errno = 0;
  *out = strtoll(digits, NULL, 10);
  if (!n || !is_digit(digits[n - 1])) FAIL(p, from, "expected a whole number");
  if (errno || n == sizeof digits - 1) FAIL(p, from, "the number does not fit 64 bits");
  return PM_OK;
}

static pm_code read_small(parser *p, int64_t max, uint32_t *out) {
  int64_t x;
  skip(p);
  const char *from = p->at;
  TRY(read_int(p, &x));
  if (x < 0 || x > max) FAIL(p, from, "the number is not in the range 0 to %" PRId64, max);
  *out = (uint32_t)x;
  return PM_OK;
}

static int hex_digit(char c) {
  if (is_digit(c)) return c - '0';
  c |= 0x20;
  return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* The character after a backslash. */
static pm_code read_escape(parser *p, const char *from, char *out) {
  if (p->at == p->end) FAIL(p, from, "the string does not end");
  char c = *p->at++;
  if (c == 'x') {
    int high = p->end - p->at >= 2 ? hex_digit(p->at[0]) : -1;
    int low = high >= 0 ? hex_digit(p->at[1]) : -1;
    if (low < 0 || high * 16 + low == 0) {
      FAIL(p, p->at, "\\x takes two hexadecimal digits that are not 00");
    }
    p->at += 2;
    *out = (char)(high * 16 + low);
    return PM_OK;
  }
  if (c != '"' && c != '\\' && c != 'n') FAIL(p, p->at - 1, "escapes are \\\" \\\\ \\n \\xNN");
  *out = c == 'n' ? '\n' : c;
  return PM_OK;
}

/* A quoted string, as text of the arena. */
static pm_code read_string(parser *p, const char **out) {
  TRY(expect(p, '"'));
  const char *from = p->at - 1;
  pm_text s;
  pm_text_init(&s, p->g->arena);
  pm_putn(&s, "", 0);
  while (p->at < p->end && *p->at != '"') {
    char c = *p->at++;
    if (c == '\n' || c == 0) FAIL(p, from, "the string does not end");
    if (c == '\\') TRY(read_escape(p, from, &c));
    pm_putn(&s, &c, 1);
  }
  if (p->at == p->end) FAIL(p, from, "the string does not end");
  p->at++;
  *out = s.at;
  return PM_OK;
}

/* `// "file":line` on the same line, if it is there. Other comments are only skipped. */
static pm_code read_place(parser *p, uint32_t *file, uint32_t *line) {
  const char *s = p->at, *text;
  while (s < p->end && (*s == ' ' || *s == '\t')) s++;
  if (p->end - s < 2 || s[0] != '/' || s[1] != '/') return PM_OK;
  for (s += 2; s < p->end && *s == ' ';) s++;
  if (s == p->end || *s != '"') return PM_OK;
  p->at = s;
  TRY(read_string(p, &text));
  TRY(expect(p, ':'));
  *file = pm_intern(p->g, text);
  return read_small(p, UINT32_MAX, line);
}

/* ---- values ------------------------------------------------------------------------------- */

/* A label: % and a word, or % and a quoted name and a word. */
static pm_code read_label(parser *p, slice *out) {
  skip(p);
  const char *from = p->at, *name;
  TRY(expect(p, '%'));
  bool quoted = p->at < p->end && *p->at == '"';
  if (quoted) TRY(read_string(p, &name));
  const char *word = p->at;
  while (p->at < p->end && is_word_char(*p->at)) p->at++;
  if (p->at == word) FAIL(p, from, quoted ? "expected _ and a number" : "expected a label");
  *out = (slice){from, (size_t)(p->at - from)};
  if (out->n > MAX_LABEL) FAIL(p, from, "the label is longer than %d bytes", MAX_LABEL);
  return PM_OK;
}

/* The user's name in a label: all before the last _number; 0 for %12. */
static uint32_t name_of(parser *p, slice label) {
  const char *end = label.at + label.n, *cut = end;
  while (cut > label.at + 1 && is_digit(cut[-1])) cut--;
  if (cut == label.at + 1) return 0;
  if (cut < end && cut[-1] == '_') end = cut - 1;
  if (label.at[1] != '"') {
    size_t n = (size_t)(end - label.at - 1);
    return pm_intern(p->g, pm_strdup(p->g->arena, label.at + 1, n));
  }
  parser inner = *p;
  const char *name = "";
  inner.at = label.at + 1;
  read_string(&inner, &name); /* it was read before */
  return pm_intern(p->g, name);
}

static uint32_t *slot_of(parser *p, slice label) {
  uint32_t mask = p->slots.n - 1, at = (uint32_t)pm_hash(label.at, label.n, 0) & mask;
  for (;; at = (at + 1) & mask) {
    uint32_t s = p->slots.at[at];
    if (!s) return &p->slots.at[at];
    const slice *other = &p->symbols.at[s].label;
    if (other->n == label.n && !memcmp(other->at, label.at, label.n)) return &p->slots.at[at];
  }
}

static void grow_slots(parser *p) {
  uint32_t n = p->slots.n ? p->slots.n * 2 : 64;
  p->slots.at = PM_NEW(p->g->arena, uint32_t, n);
  p->slots.n = p->slots.cap = n;
  for (uint32_t k = 1; k < p->symbols.n; k++) *slot_of(p, p->symbols.at[k].label) = k;
}

static pm_code define(parser *p, slice label, pm_val v) {
  if (p->symbols.n * 2 >= p->slots.n) grow_slots(p);
  uint32_t *slot = slot_of(p, label);
  if (*slot) FAIL(p, label.at, "%.*s is defined twice", shown(label), label.at);
  pm_vec_push(p->g->arena, &p->symbols, ((symbol){label, v}));
  *slot = p->symbols.n - 1;
  pm_value_of(p->g, v)->name = name_of(p, label);
  return PM_OK;
}

static pm_code read_value(parser *p, pm_val *out) {
  slice label;
  TRY(read_label(p, &label));
  uint32_t s = *slot_of(p, label);
  *out = s ? p->symbols.at[s].val : 0;
  if (*out) return PM_OK;
  FAIL(p, label.at, s ? "%.*s is not visible here" : "%.*s is not defined", shown(label), label.at);
}

/* ---- types and layouts -------------------------------------------------------------------- */

static pm_code read_dims(parser *p, pm_type *t) {
  if (!eat(p, '[') || eat(p, ']')) return PM_OK;
  do {
    skip(p);
    if (t->rank == PM_MAX_RANK) FAIL(p, p->at, "more than %d dimensions", PM_MAX_RANK);
    TRY(read_int(p, &t->dim[t->rank++]));
  } while (eat(p, ','));
  return expect(p, ']');
}

static pm_code read_type(parser *p, pm_type *t) {
  slice word = read_word(p);
  const char *from = word.at;
  *t = (pm_type){.kind = PM_ARRAY};
  for (uint8_t s = 0; s < PM_SPACE_COUNT; s++) {
    if (!*pm_spaces[s].text || !is_text(word, pm_spaces[s].text)) continue;
    t->kind = PM_REF;
    t->space = s;
    word = read_word(p);
    break;
  }
  if (t->kind == PM_ARRAY && is_text(word, "barrier")) {
    t->kind = PM_BARRIER;
    t->space = PM_SMEM;
  } else if (t->kind == PM_REF && is_text(word, "semaphore")) {
    t->kind = PM_SEMAPHORE;
    t->dtype = PM_I32;
  } else {
    int dtype = word.n < 16 ? pm_dtype_find(pm_strdup(p->g->arena, word.at, word.n)) : -1;
    if (dtype < 0) FAIL(p, word.n ? word.at : from, "expected a type");
    t->dtype = (uint8_t)dtype;
  }
  TRY(read_dims(p, t));
  pm_code rc = pm_type_check(p->g, t, "a value", p->err);
  return rc ? builder_failed(p, from) : PM_OK;
}

/* A layout's text: words, dots, and pairs of parentheses. */
static slice read_layout(parser *p) {
  skip(p);
  slice s = {p->at, 0};
  while (p->at < p->end && (is_word_char(*p->at) || *p->at == '.' || *p->at == '(')) {
    if (*p->at++ != '(') continue;
    while (p->at < p->end && *p->at != ')' && *p->at != '\n') p->at++;
    if (p->at < p->end && *p->at == ')') p->at++;
  }
  s.n = (size_t)(p->at - s.at);
  return s;
}

static pm_code find_layout(parser *p, slice text, const pm_type *t, pm_layid *out) {
  if (t->kind != PM_ARRAY) FAIL(p, text.at, "only arrays have a layout");
  if (pm_layout_parse(p->g, text.at, text.n, t, out, p->err)) return builder_failed(p, text.at);
  return PM_OK;
}

static pm_code read_typed(parser *p, pm_type *t, slice *layout) {
  TRY(read_type(p, t));
  *layout = eat(p, '@') ? read_layout(p) : (slice){0};
  return PM_OK;
}

static pm_code set_layout(parser *p, pm_val v, slice layout) {
  pm_layid id = 0;
  if (!layout.at) return PM_OK;
  pm_type t = *pm_typeof(p->g, v);
  TRY(find_layout(p, layout, &t, &id));
  pm_value_of(p->g, v)->layout = id;
  return PM_OK;
}

/* ---- attributes --------------------------------------------------------------------------- */

static pm_code read_double(parser *p, int64_t *word) {
  double x;
  char s[64], *stop;
  size_t n = 0;
  skip(p);
  const char *from = p->at;
  while (p->at < p->end && n < sizeof s - 1 &&
         (is_word_char(*p->at) || (*p->at && strchr("+-.()", *p->at)))) {
    s[n++] = *p->at++;
  }
  s[n] = 0;
  if (!strncmp(s, "nan(0x", 6)) {
    uint64_t bits = strtoull(s + 4, &stop, 16);
    memcpy(&x, &bits, sizeof x);
    if (x == x || strcmp(stop, ")")) FAIL(p, from, "these are not the bits of a NaN");
  } else if (!strcmp(s, "nan")) {
    *word = INT64_C(0x7ff8000000000000);
    return PM_OK;
  } else {
    char *point = strchr(s, '.');
    if (point) *point = localeconv()->decimal_point[0];
    x = strtod(s, &stop);
    if (!n || *stop || x != x) FAIL(p, from, "expected a number");
  }
  memcpy(word, &x, sizeof *word);
  return PM_OK;
}

static pm_code read_list(parser *p, pm_attr_arg *attr) {
  PM_VEC(int64_t) list = {0};
  TRY(expect(p, '['));
  if (!eat(p, ']')) {
    do {
      int64_t x;
      skip(p);
      if (attr->id == PM_ATTR_STARTS && eat(p, '?')) x = PM_DYNAMIC;
      else if (attr->id == PM_ATTR_SIZES && eat(p, '_')) x = PM_DROPPED;
      else TRY(read_int(p, &x));
      pm_vec_push(p->g->arena, &list, x);
    } while (eat(p, ','));
    TRY(expect(p, ']'));
  }
  attr->list = list.at;
  attr->n = list.n;
  return PM_OK;
}

static pm_code read_enum(parser *p, pm_enum kind, int64_t *out) {
  slice word = read_word(p);
  const char *text;
  for (*out = 0; (text = pm_enum_text(kind, *out)); ++*out) {
    if (is_text(word, text)) return PM_OK;
  }
  FAIL(p, word.at, "'%.*s' is not a value of this attribute", shown(word), word.at);
}

static pm_code read_attr_value(parser *p, statement *s, pm_attr_arg *attr) {
  const char *text;
  skip(p);
  switch (pm_attr_forms[attr->id]) {
    case PM_FORM_INT: return read_int(p, &attr->i);
    case PM_FORM_LIST: return read_list(p, attr);
    case PM_FORM_BITS: s->bits = p->at; return read_double(p, &attr->i);
    case PM_FORM_LAYOUT: s->layout = p->at; return read_layout(p), PM_OK;
    case PM_FORM_STR:
      TRY(read_string(p, &text));
      attr->i = pm_intern(p->g, text);
      return PM_OK;
    default: return read_enum(p, pm_attr_forms[attr->id] - PM_FORM_ENUM_AXIS, &attr->i);
  }
}

static pm_code read_attr(parser *p, statement *s) {
  const pm_op_info *info = &pm_ops[s->code];
  slice word = read_word(p);
  pm_attr_arg *attr = &s->attrs[s->n_attrs];
  for (int k = 0; k < info->n_attrs; k++) {
    if (is_text(word, pm_attr_text[info->attrs[k]])) attr->id = info->attrs[k];
  }
  if (!attr->id) FAIL(p, word.at, "%s has no attribute '%.*s'", info->text, shown(word), word.at);
  for (uint32_t k = 0; k < s->n_attrs; k++) {
    if (s->attrs[k].id == attr->id) {
      FAIL(p, word.at, "attribute %s is given twice", pm_attr_text[attr->id]);
    }
  }
  TRY(expect(p, '='));
  s->n_attrs++;
  return read_attr_value(p, s, attr);
}

/* Attributes open with `{ word =`, regions with `{` and anything else. */
static bool attrs_follow(parser *p) {
  const char *from = p->at;
  bool yes = eat(p, '{') && read_word(p).n && eat(p, '=');
  p->at = from;
  return yes;
}

static pm_code read_attrs(parser *p, statement *s) {
  if (!attrs_follow(p)) return PM_OK;
  TRY(expect(p, '{'));
  do TRY(read_attr(p, s));
  while (eat(p, ','));
  return expect(p, '}');
}

/* Now that the result's type is known: numbers of int type, and layouts. */
static pm_code finish_attrs(parser *p, statement *s) {
  const char *from = p->at;
  for (uint32_t k = 0; k < s->n_attrs; k++) {
    pm_attr_arg *attr = &s->attrs[k];
    uint8_t form = pm_attr_forms[attr->id];
    if ((form == PM_FORM_BITS || form == PM_FORM_LAYOUT) && s->types.n != 1) {
      FAIL(p, s->at, "expected ':' and the type of the result");
    }
    if (form == PM_FORM_BITS && !pm_is_float(s->types.at[0].dtype)) {
      p->at = s->bits;
      TRY(read_int(p, &attr->i));
      if (p->at < p->end && (*p->at == '.' || is_word_char(*p->at))) {
        FAIL(p, s->bits, "expected a whole number");
      }
    } else if (form == PM_FORM_LAYOUT) {
      p->at = s->layout;
      slice text = read_layout(p);
      pm_layid id = 0;
      if (!is_text(text, "none")) TRY(find_layout(p, text, &s->types.at[0], &id));
      attr->i = id;
    }
  }
  p->at = from;
  return PM_OK;
}

/* ---- statements --------------------------------------------------------------------------- */

static pm_code read_results(parser *p, statement *s) {
  if (!next_is(p, '%')) return PM_OK;
  do {
    slice label;
    TRY(read_label(p, &label));
    pm_vec_push(p->g->arena, &s->results, label);
  } while (eat(p, ','));
  return expect(p, '=');
}

static pm_code read_opcode(parser *p, statement *s) {
  slice word = read_word(p);
  s->at = word.at;
  s->code = (pm_opcode)pm_op_find(word.at, word.n);
  if (s->code) return PM_OK;
  FAIL(p, word.at, word.n ? "'%.*s' is not an op" : "expected an op%.*s", shown(word), word.at);
}

/* On the line of the op; what follows a comma may stand on the next one. */
static pm_code read_operands(parser *p, statement *s) {
  while (p->at < p->end && (*p->at == ' ' || *p->at == '\t')) p->at++;
  if (p->at == p->end || *p->at != '%') return PM_OK;
  do {
    pm_val v;
    TRY(read_value(p, &v));
    pm_vec_push(p->g->arena, &s->in, v);
  } while (eat(p, ','));
  return PM_OK;
}

static pm_code read_result_types(parser *p, statement *s) {
  if (s->results.n == 0) return PM_OK;
  TRY(expect(p, ':'));
  do {
    pm_type t;
    slice layout;
    TRY(read_typed(p, &t, &layout));
    pm_vec_push(p->g->arena, &s->types, t);
    pm_vec_push(p->g->arena, &s->layouts, layout);
  } while (eat(p, ','));
  if (s->types.n == s->results.n) return PM_OK;
  FAIL(p, s->at, "%u results, but %u types", s->results.n, s->types.n);
}

/* The op is made: its results are as the text says, and get their labels. */
static pm_code bind_results(parser *p, const statement *s, pm_opid op) {
  const pm_op *o = pm_get(p->g, op);
  pm_val first = o->out;
  if (o->n_out != s->results.n) {
    FAIL(p, s->at, "%s has %u results, not %u", pm_ops[s->code].text, o->n_out, s->results.n);
  }
  for (uint32_t k = 0; k < s->results.n; k++) {
    const pm_type *made = pm_typeof(p->g, first + k);
    if (!pm_type_equal(made, &s->types.at[k])) {
      FAIL(p, s->results.at[k].at, "the result is %s, not %s", pm_type_text(p->g->arena, made),
           pm_type_text(p->g->arena, &s->types.at[k]));
    }
    TRY(define(p, s->results.at[k], first + k));
    TRY(set_layout(p, first + k, s->layouts.at[k]));
  }
  return PM_OK;
}

static void close_scope(parser *p, uint32_t mark) {
  for (uint32_t k = mark; k < p->symbols.n; k++) p->symbols.at[k].val = 0;
}

static pm_code parse_region(parser *p, pm_opid op, uint32_t k) {
  uint32_t mark = p->symbols.n;
  if (p->depth == MAX_NESTING) FAIL(p, p->at, "more than %d nested regions", MAX_NESTING);
  p->depth++;
  pm_blk block = pm_region(p->g, op, k);
  TRY(parse_block(p, block, pm_region_args(p->g, op) > 0));
  p->depth--;
  const pm_block *b = &p->g->blocks.at[block];
  if (!b->ops.n || pm_get(p->g, pm_terminator(p->g, block))->code != PM_OP_YIELD) {
    FAIL(p, p->at, "the region does not end with a yield");
  }
  TRY(expect(p, '}'));
  close_scope(p, mark);
  return PM_OK;
}

/* How many `{ ... } { ... }` stand here. Braces in strings and comments do not count. */
static uint32_t count_regions(parser *p) {
  const char *from = p->at;
  uint32_t n = 0;
  while (next_is(p, '{')) {
    int64_t open = 0;
    do {
      const char *ignored;
      skip(p);
      if (p->at == p->end) break;
      if (*p->at == '"') {
        if (read_string(p, &ignored)) break;
        continue;
      }
      open += (*p->at == '{') - (*p->at == '}');
      p->at++;
    } while (open > 0);
    n++;
  }
  p->at = from;
  p->err->code = PM_OK;
  return n;
}

static pm_code parse_control(parser *p, statement *s, pm_builder *b) {
  uint32_t n = pm_ops[s->code].regions;
  pm_opid op;
  if (n == PM_VARIABLE) n = count_regions(p);
  TRY(expect(p, '{'));
  TRY(read_place(p, &b->file, &b->line));
  if (pm_open(b, s->code, s->in.at, s->in.n, n, s->attrs, s->n_attrs, &op, p->err)) {
    return builder_failed(p, s->at);
  }
  for (uint32_t k = 0; k < n; k++) {
    if (k) TRY(expect(p, '{'));
    TRY(parse_region(p, op, k));
  }
  if (pm_close(b, op, p->err)) return builder_failed(p, s->at);
  return bind_results(p, s, op);
}

static pm_code parse_statement(parser *p, pm_blk block) {
  statement s = {0};
  pm_builder b = {.g = p->g, .block = block};
  TRY(read_results(p, &s));
  TRY(read_opcode(p, &s));
  TRY(read_operands(p, &s));
  TRY(read_attrs(p, &s));
  TRY(read_result_types(p, &s));
  TRY(finish_attrs(p, &s));
  if (pm_ops[s.code].regions) return parse_control(p, &s, &b);
  TRY(read_place(p, &b.file, &b.line));
  pm_opid op = 0;
  const pm_type *given = s.types.n ? &s.types.at[0] : NULL;
  if (s.results.n != pm_ops[s.code].out) {
    FAIL(p, s.at, "%s has %u results, not %u", pm_ops[s.code].text, pm_ops[s.code].out,
         s.results.n);
  }
  if (pm_emit(&b, s.code, s.in.at, s.in.n, given, s.attrs, s.n_attrs, &op, p->err)) {
    return builder_failed(p, s.at);
  }
  return bind_results(p, &s, op);
}

/* ---- arguments and blocks ----------------------------------------------------------------- */

/* `out` or `out(k)` before an argument of the kernel; -2: an operand. */
static pm_code read_role(parser *p, int64_t *alias) {
  *alias = -2;
  if (!eat_word(p, "out")) return PM_OK;
  *alias = -1;
  if (!eat(p, '(')) return PM_OK;
  const char *from = p->at;
  TRY(read_int(p, alias));
  if (*alias < 0 || *alias >= p->g->n_operands) FAIL(p, from, "there is no such operand");
  return expect(p, ')');
}

static pm_code add_kernel_arg(parser *p, const pm_type *t, int64_t alias, const char *where,
                              pm_val *v) {
  pm_graph *g = p->g;
  if (alias == -2 && g->n_outputs) FAIL(p, where, "operands come before outputs");
  *v = pm_add_arg(g, 1, t);
  if (alias == -2) {
    g->n_operands++;
    return PM_OK;
  }
  pm_vec_push(g->arena, &p->alias, (int32_t)alias);
  g->n_outputs++;
  g->n_inout += alias >= 0;
  return PM_OK;
}

static pm_code find_region_arg(parser *p, pm_blk block, uint32_t k, const pm_type *t,
                               const char *where, pm_val *v) {
  const pm_block *b = &p->g->blocks.at[block];
  if (k >= b->n_args) FAIL(p, where, "the region has %u arguments", b->n_args);
  *v = b->arg + k;
  const pm_type *made = pm_typeof(p->g, *v);
  if (pm_type_equal(made, t)) return PM_OK;
  FAIL(p, where, "the argument is %s, not %s", pm_type_text(p->g->arena, made),
       pm_type_text(p->g->arena, t));
}

/* Of an operand; NULL where there are none. */
static pm_code read_strides(parser *p, const pm_type *t, const int64_t **out) {
  const char *from = p->at;
  *out = NULL;
  if (!eat_word(p, "strides")) return PM_OK;
  int64_t *s = pm_alloc(p->g->arena, PM_MAX_RANK * sizeof *s);
  if (p->g->n_outputs || !t->rank) FAIL(p, from, "only operands with dimensions have strides");
  for (int d = 0; d < t->rank; d++) {
    TRY(expect(p, d ? ',' : '['));
    TRY(read_int(p, &s[d]));
    if (s[d] < 0) FAIL(p, from, "strides are not negative");
  }
  *out = s;
  return expect(p, ']');
}

static pm_code read_extents(parser *p, uint32_t argument, const pm_type *t) {
  uint32_t size[PM_MAX_RANK];
  if (!eat_word(p, "extents")) return PM_OK;
  for (int d = 0; d < t->rank; d++) {
    TRY(expect(p, d ? ',' : '['));
    TRY(read_small(p, PM_MAX_SIZES, &size[d]));
  }
  if (pm_set_extents(p->g, argument, size, p->err)) return p->err->code;
  return expect(p, ']');
}

static pm_code parse_args(parser *p, pm_blk block) {
  uint32_t n = 0;
  bool strided = false;
  do {
    int64_t alias = -2;
    slice label, layout;
    pm_type t;
    pm_val v = 0;
    if (block == 1) TRY(read_role(p, &alias));
    TRY(read_label(p, &label));
    TRY(expect(p, ':'));
    TRY(read_typed(p, &t, &layout));
    if (block == 1) TRY(add_kernel_arg(p, &t, alias, label.at, &v));
    else TRY(find_region_arg(p, block, n, &t, label.at, &v));
    TRY(define(p, label, v));
    TRY(set_layout(p, v, layout));
    if (block == 1) {
      const int64_t *strides;
      TRY(read_strides(p, &t, &strides));
      pm_vec_push(p->g->arena, &p->strides, strides);
      if (strides) strided = true;
      TRY(read_extents(p, n, &t));
    }
    n++;
  } while (eat(p, ','));
  if (strided) p->g->strides = p->strides.at;
  uint32_t n_args = p->g->blocks.at[block].n_args;
  if (n != n_args) FAIL(p, p->at, "the region has %u arguments, not %u", n_args, n);
  return PM_OK;
}

/* Up to the closing brace, which is left. */
static pm_code parse_block(parser *p, pm_blk block, bool with_args) {
  if (eat_word(p, "args")) TRY(parse_args(p, block));
  else if (with_args) FAIL(p, p->at, "expected args");
  while (!next_is(p, '}')) {
    skip(p);
    if (p->at == p->end) FAIL(p, p->at, "the text ends inside a block");
    TRY(parse_statement(p, block));
  }
  return PM_OK;
}

/* ---- the kernel --------------------------------------------------------------------------- */

static pm_code read_sizes(parser *p, int64_t *size, uint32_t max, uint32_t *n) {
  *n = 0;
  TRY(expect(p, '['));
  if (eat(p, ']')) return PM_OK;
  do {
    skip(p);
    if (*n == max) FAIL(p, p->at, "more than %u axes", max);
    TRY(read_int(p, &size[(*n)++]));
  } while (eat(p, ','));
  return expect(p, ']');
}

static pm_code read_stage(parser *p, uint8_t *stage) {
  static const char *const stages[] = {"traced", "laid_out", "planned", "synced"};
  slice word = read_word(p);
  for (*stage = 0; *stage < PM_COUNT(stages); ++*stage) {
    if (is_text(word, stages[*stage])) return PM_OK;
  }
  FAIL(p, word.at, "the stage is traced, laid_out, planned or synced");
}

static pm_code read_target(parser *p, const pm_target **target) {
  const slice word = read_word(p);
  *target = pm_target_named(pm_strdup(p->g->arena, word.at, word.n));
  if (*target) return PM_OK;
  FAIL(p, word.at, "the target is one of %s", pm_target_list(p->g->arena, 0));
}

static pm_code read_profile(parser *p) {
  pm_graph *g = p->g;
  int64_t warps;
  TRY(read_int(p, &g->profile_words));
  TRY(read_int(p, &warps));
  g->profile_warps = warps != 0;
  TRY(read_small(p, INT16_MAX, &g->profile_output));
  return read_int(p, &g->profile_offset);
}

static pm_code read_size(parser *p) {
  pm_size s = {0};
  const char *name;
  TRY(read_string(p, &name));
  TRY(read_enum(p, PM_ENUM_SIZE, &s.how));
  int64_t *const number[] = {&s.a, &s.b, &s.least, &s.most, &s.multiple};
  for (size_t k = 0; k < PM_COUNT(number); k++) TRY(read_int(p, number[k]));
  s.name = pm_intern(p->g, name);
  return pm_add_size(p->g, &s, p->err) ? PM_OK : p->err->code;
}

static pm_code read_grid_sizes(parser *p) {
  int64_t size[PM_MAX_RANK];
  uint32_t n;
  TRY(read_sizes(p, size, PM_MAX_RANK, &n));
  for (uint32_t k = 0; k < n; k++) {
    if (size[k] < 0 || size[k] > pm_n_sizes(p->g)) FAIL(p, p->at, "there is no such size");
    p->g->grid_sizes[k] = (uint32_t)size[k];
  }
  return PM_OK;
}

static pm_code read_clause(parser *p) {
  pm_graph *g = p->g;
  slice word = read_word(p);
  if (is_text(word, "grid")) return read_sizes(p, g->grid, PM_MAX_RANK, &g->n_grid);
  if (is_text(word, "cluster")) return read_sizes(p, g->cluster, 3, &g->n_cluster);
  if (is_text(word, "mesh")) return read_sizes(p, g->mesh, PM_MAX_RANK, &g->n_mesh);
  if (is_text(word, "size")) return read_size(p);
  if (is_text(word, "grid_sizes")) return read_grid_sizes(p);
  if (is_text(word, "threads")) return read_small(p, 1024, &g->n_threads);
  if (is_text(word, "smem")) return read_int(p, &g->smem_bytes);
  if (is_text(word, "tmem")) return read_int(p, &g->tmem_columns);
  if (is_text(word, "stage")) return read_stage(p, &g->stage);
  if (is_text(word, "target")) return read_target(p, &g->target);
  if (is_text(word, "scratch")) {
    TRY(read_int(p, &g->scratch_offset));
    return read_int(p, &g->scratch_bytes);
  }
  if (is_text(word, "profile")) return read_profile(p);
  if (is_text(word, "approx_math")) return g->approx_math = true, PM_OK;
  if (is_text(word, "no_auto_barriers")) return g->no_auto_barriers = true, PM_OK;
  if (is_text(word, "reduction_scratch")) return read_int(p, &g->reduction_scratch);
  FAIL(p, word.at,
       "expected grid, cluster, mesh, size, grid_sizes, threads, approx_math, no_auto_barriers, "
       "reduction_scratch, "
       "profile, smem, tmem, scratch, target, stage or '{'");
}

static pm_code parse_kernel(parser *p) {
  pm_graph *g = p->g;
  const char *text;
  skip(p);
  if (!eat_word(p, "kernel")) FAIL(p, p->at, "expected kernel");
  TRY(read_string(p, &g->name));
  while (!eat(p, '{')) TRY(read_clause(p));
  while (eat_word(p, "warning")) {
    TRY(read_string(p, &text));
    pm_vec_push(g->arena, &g->warnings, text);
  }
  TRY(parse_block(p, 1, false));
  TRY(expect(p, '}'));
  skip(p);
  if (p->at < p->end) FAIL(p, p->at, "expected the end of the text");
  return PM_OK;
}

pm_code pm_parse(pm_arena *a, const char *text, size_t n, pm_graph **out, pm_err *err) {
  parser p = {.g = pm_graph_new(a, ""), .text = text, .at = text, .end = text + n, .err = err};
  pm_vec_push(a, &p.symbols, (symbol){0});
  grow_slots(&p);
  TRY(parse_kernel(&p));
  p.g->alias = p.alias.at;
  pm_code rc = pm_verify(p.g, err);
  if (rc == PM_E_INTERNAL) rc = err->code = PM_E_VALUE; /* the text is at fault */
  if (!rc) *out = p.g;
  return rc;
}
