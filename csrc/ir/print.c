/* Writing the text form (docs/graph-text.md). ir/parse.c reads it.
 *
 * One walk in program order. Values are numbered 1, 2, ... in the order in which the text defines
 * them, whatever their index, so that equal graphs give equal text. Attributes that have their
 * default value are omitted if they are `quiet`. Nothing here trusts the graph beyond its array
 * bounds: a graph that pm_verify refuses can also be printed. */
#include <inttypes.h>
#include <locale.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "layout.h"
#include "rules.h"

typedef struct printer {
  const pm_graph *g;
  pm_text *out;
  uint32_t *number; /* per value, 0: not defined yet */
  uint32_t n_numbers;
} printer;

static void put_block(printer *p, pm_blk block, int indent);

/* ---- words -------------------------------------------------------------------------------- */

static void put_string(pm_text *out, const char *s) {
  pm_put(out, "\"");
  for (; *s; s++) {
    unsigned char c = (unsigned char)*s;
    if (c == '"' || c == '\\') {
      pm_putf(out, "\\%c", c);
    } else if (c == '\n') {
      pm_put(out, "\\n");
    } else if (c < 0x20 || c == 0x7f) {
      pm_putf(out, "\\x%02x", c);
    } else {
      pm_putn(out, s, 1);
    }
  }
  pm_put(out, "\"");
}

/* The shortest decimal that reads back as the same double; always with a point, exponent or name.
 */
static void put_double(pm_text *out, double x) {
  char s[64];
  if (isnan(x)) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (bits == UINT64_C(0x7ff8000000000000)) pm_put(out, "nan");
    else pm_putf(out, "nan(0x%" PRIx64 ")", bits);
    return;
  }
  if (isinf(x)) {
    pm_put(out, x < 0 ? "-inf" : "inf");
    return;
  }
  for (int digits = 1; digits <= 17; digits++) {
    snprintf(s, sizeof s, "%.*g", digits, x);
    if (strtod(s, NULL) == x) break;
  }
  char *point = strstr(s, localeconv()->decimal_point);
  if (point) *point = '.';
  pm_putf(out, "%s%s", s, strpbrk(s, ".e") ? "" : ".0");
}

static bool is_word(const char *s) {
  for (; *s; s++) {
    unsigned char c = (unsigned char)*s | 0x20;
    bool letter = (c >= 'a' && c <= 'z') || (unsigned char)*s >= 0x80;
    if (!letter && !(*s >= '0' && *s <= '9') && *s != '_') return false;
  }
  return true;
}

static void put_value(printer *p, pm_val v) {
  uint32_t number = v < p->g->values.n ? p->number[v] : 0;
  if (!number) {
    pm_putf(p->out, "%%undefined_%u", v);
    return;
  }
  const char *name = p->g->strings.at[p->g->values.at[v].name];
  pm_put(p->out, "%");
  if (is_word(name)) pm_put(p->out, name);
  else put_string(p->out, name);
  pm_putf(p->out, *name ? "_%u" : "%u", number);
}

static void put_type(printer *p, pm_val v) {
  const pm_value *value = pm_value_of(p->g, v);
  pm_put(p->out, pm_type_text(p->out->arena, &value->type));
  if (!value->layout) return;
  pm_putf(p->out, " @%s", pm_layout_text(p->out->arena, pm_layout_of(p->g, value->layout)));
}

static void define(printer *p, pm_val v) {
  p->number[v] = ++p->n_numbers;
  put_value(p, v);
}

static void put_place(printer *p, uint32_t file, uint32_t line) {
  if (!file && !line) return;
  pm_put(p->out, "  // ");
  put_string(p->out, p->g->strings.at[file]);
  pm_putf(p->out, ":%u", line);
}

static void put_indent(printer *p, int indent) {
  for (int k = 0; k < indent; k++) pm_put(p->out, "  ");
}

/* ---- attributes --------------------------------------------------------------------------- */

static const bool quiet[PM_ATTR_COUNT] = {
    [PM_ATTR_LAYOUT] = true,      [PM_ATTR_OPTIMIZED] = true,  [PM_ATTR_TILING] = true,
    [PM_ATTR_SWIZZLE] = true,     [PM_ATTR_GIVEN] = true,      [PM_ATTR_OFFSET] = true,
    [PM_ATTR_COMMIT] = true,      [PM_ATTR_PREDICATED] = true, [PM_ATTR_COLLECTIVE] = true,
    [PM_ATTR_READ_ONLY] = true,   [PM_ATTR_CLUSTER] = true,    [PM_ATTR_ORDER] = true,
    [PM_ATTR_STRIDES] = true,     [PM_ATTR_UNION] = true,      [PM_ATTR_DIMS] = true,
    [PM_ATTR_EVICT_FIRST] = true, [PM_ATTR_APART] = true,      [PM_ATTR_LEADER] = true,
    [PM_ATTR_EXACT] = true,       [PM_ATTR_INTERPRET] = true,  [PM_ATTR_LABEL] = true,
    [PM_ATTR_PACKED] = true,      [PM_ATTR_STAGE] = true,      [PM_ATTR_PLACED] = true,
    [PM_ATTR_TENSOR_CORE] = true, [PM_ATTR_PAIR] = true,       [PM_ATTR_TMEM_REDUCE] = true,
    [PM_ATTR_RELEASE] = true,     [PM_ATTR_PORTABLE] = true,
};

static int64_t default_of(uint8_t id) { return id == PM_ATTR_OFFSET ? -1 : 0; }

static void put_list(pm_text *out, uint8_t id, const int64_t *list) {
  pm_put(out, "[");
  for (int64_t k = 0; k < list[0]; k++) {
    int64_t x = list[k + 1];
    pm_put(out, k ? ", " : "");
    if (id == PM_ATTR_STARTS && x == PM_DYNAMIC) pm_put(out, "?");
    else if (id == PM_ATTR_SIZES && x == PM_DROPPED) pm_put(out, "_");
    else pm_putf(out, "%" PRId64, x);
  }
  pm_put(out, "]");
}

static void put_bits(printer *p, const pm_op *op, int64_t word) {
  if (!op->n_out || !pm_is_float(pm_typeof(p->g, op->out)->dtype)) {
    pm_putf(p->out, "%" PRId64, word);
    return;
  }
  double x;
  memcpy(&x, &word, sizeof x);
  put_double(p->out, x);
}

static void put_attr(printer *p, const pm_op *op, uint8_t id, int64_t word) {
  const pm_graph *g = p->g;
  pm_putf(p->out, "%s = ", pm_attr_text[id]);
  switch (pm_attr_forms[id]) {
    case PM_FORM_INT: pm_putf(p->out, "%" PRId64, word); break;
    case PM_FORM_BITS: put_bits(p, op, word); break;
    case PM_FORM_LIST: put_list(p->out, id, &g->lists.at[word]); break;
    case PM_FORM_STR: put_string(p->out, g->strings.at[word]); break;
    case PM_FORM_LAYOUT:
      pm_put(p->out, word ? pm_layout_text(p->out->arena, g->layouts.at[word]) : "none");
      break;
    default: {
      const char *text = pm_enum_text(pm_attr_forms[id] - PM_FORM_ENUM_AXIS, word);
      if (text) pm_put(p->out, text);
      else pm_putf(p->out, "%" PRId64, word);
    }
  }
}

static void put_attrs(printer *p, const pm_op *op) {
  const pm_op_info *info = &pm_ops[op->code];
  const char *before = " {";
  for (int k = 0; k < info->n_attrs; k++) {
    uint8_t id = info->attrs[k];
    int64_t word = p->g->attrs.at[op->attr + (uint32_t)k];
    if (quiet[id] && word == default_of(id)) continue;
    pm_put(p->out, before);
    put_attr(p, op, id, word);
    before = ", ";
  }
  if (*before == ',') pm_put(p->out, "}");
}

/* ---- ops and blocks ----------------------------------------------------------------------- */

static void put_op(printer *p, pm_opid id, int indent) {
  const pm_op *op = pm_get(p->g, id);
  put_indent(p, indent);
  for (uint32_t k = 0; k < op->n_out; k++) {
    pm_put(p->out, k ? ", " : "");
    define(p, op->out + k);
  }
  pm_putf(p->out, "%s%s", op->n_out ? " = " : "", pm_ops[op->code].text);
  for (uint32_t k = 0; k < op->n_in; k++) {
    pm_put(p->out, k ? ", " : " ");
    put_value(p, pm_in(p->g, id, k));
  }
  put_attrs(p, op);
  for (uint32_t k = 0; k < op->n_out; k++) {
    pm_put(p->out, k ? ", " : " : ");
    put_type(p, op->out + k);
  }
  for (uint32_t k = 0; k < op->n_regions; k++) {
    pm_put(p->out, " {");
    if (k == 0) put_place(p, op->file, op->line);
    pm_put(p->out, "\n");
    put_block(p, pm_region(p->g, id, k), indent + 1);
    put_indent(p, indent);
    pm_put(p->out, "}");
  }
  if (!op->n_regions) put_place(p, op->file, op->line);
  pm_put(p->out, "\n");
}

/* "out " or "out(2) " before an argument of the kernel that is an output */
static void put_role(printer *p, pm_blk block, uint32_t index) {
  const pm_graph *g = p->g;
  if (block != 1 || index < g->n_operands || index - g->n_operands >= g->n_outputs) return;
  int32_t alias = g->alias ? g->alias[index - g->n_operands] : -1;
  if (alias < 0) pm_put(p->out, "out ");
  else pm_putf(p->out, "out(%d) ", (int)alias);
}

/* " strides [1, 64]" after an operand that is not row-major */
static void put_strides(printer *p, uint32_t index) {
  const pm_graph *g = p->g;
  const int64_t *s = g->strides && index < g->n_operands ? g->strides[index] : NULL;
  if (!s) return;
  const int rank = pm_typeof(g, g->blocks.at[1].arg + index)->rank;
  for (int d = 0; d < rank; d++)
    pm_putf(p->out, "%s%lld", d ? ", " : " strides [", (long long)s[d]);
  pm_put(p->out, "]");
}

/* " extents [1, 0]" behind an argument whose extents are known at run time only */
static void put_extents(printer *p, uint32_t index) {
  const pm_graph *g = p->g;
  const int rank = pm_typeof(g, g->blocks.at[1].arg + index)->rank;
  bool any = false;
  for (int d = 0; d < rank; d++) any |= pm_extent_of(g, index, (uint32_t)d) != 0;
  for (int d = 0; any && d < rank; d++)
    pm_putf(p->out, "%s%u", d ? ", " : " extents [", pm_extent_of(g, index, (uint32_t)d));
  if (any) pm_put(p->out, "]");
}

static void put_args(printer *p, pm_blk block, int indent) {
  const pm_block *b = &p->g->blocks.at[block];
  if (!b->n_args) return;
  put_indent(p, indent);
  for (uint32_t k = 0; k < b->n_args; k++) {
    pm_put(p->out, k ? ", " : "args ");
    put_role(p, block, k);
    define(p, b->arg + k);
    pm_put(p->out, ": ");
    put_type(p, b->arg + k);
    if (block == 1) put_strides(p, k);
    if (block == 1) put_extents(p, k);
  }
  pm_put(p->out, "\n");
}

static void put_block(printer *p, pm_blk block, int indent) {
  put_args(p, block, indent);
  for (uint32_t k = 0; k < p->g->blocks.at[block].ops.n; k++) {
    put_op(p, p->g->blocks.at[block].ops.at[k], indent);
  }
}

static void put_sizes(pm_text *out, const char *word, const int64_t *size, uint32_t n) {
  pm_putf(out, " %s [", word);
  for (uint32_t k = 0; k < n; k++) pm_putf(out, k ? ", %" PRId64 : "%" PRId64, size[k]);
  pm_put(out, "]");
}

/* size "M" extent 0 0 1 65536 8: how, of what, least, most, multiple */
static void put_sizes_of_call(printer *p) {
  const pm_graph *g = p->g;
  bool open = false;
  for (uint32_t k = 1; k < g->sizes.n; k++) {
    const pm_size *s = &g->sizes.at[k];
    pm_put(p->out, " size ");
    put_string(p->out, g->strings.at[s->name]);
    pm_putf(p->out, " %s %" PRId64 " %" PRId64 " %" PRId64 " %" PRId64 " %" PRId64,
            pm_enum_text(PM_ENUM_SIZE, s->how), s->a, s->b, s->least, s->most, s->multiple);
  }
  for (uint32_t k = 0; k < g->n_grid; k++) open |= g->grid_sizes[k] != 0;
  for (uint32_t k = 0; open && k < g->n_grid; k++)
    pm_putf(p->out, "%s%u", k ? ", " : " grid_sizes [", g->grid_sizes[k]);
  if (open) pm_put(p->out, "]");
}

static void put_head(printer *p) {
  static const char *const stages[] = {"traced", "laid_out", "planned", "synced"};
  const pm_graph *g = p->g;
  pm_put(p->out, "kernel ");
  put_string(p->out, g->name);
  put_sizes(p->out, "grid", g->grid, g->n_grid);
  put_sizes(p->out, "cluster", g->cluster, g->n_cluster);
  if (g->n_mesh) put_sizes(p->out, "mesh", g->mesh, g->n_mesh);
  put_sizes_of_call(p);
  pm_putf(p->out, " threads %u", g->n_threads);
  if (g->approx_math) pm_put(p->out, " approx_math");
  if (g->no_auto_barriers) pm_put(p->out, " no_auto_barriers");
  if (g->reduction_scratch != PM_REDUCTION_SCRATCH) {
    pm_putf(p->out, " reduction_scratch %" PRId64, g->reduction_scratch);
  }
  if (g->profile_words) {
    pm_putf(p->out, " profile %" PRId64 " %d %u %" PRId64, g->profile_words, (int)g->profile_warps,
            g->profile_output, g->profile_offset);
  }
  if (g->smem_bytes) pm_putf(p->out, " smem %" PRId64, g->smem_bytes);
  if (g->tmem_columns) pm_putf(p->out, " tmem %" PRId64, g->tmem_columns);
  if (g->scratch_offset || g->scratch_bytes) {
    pm_putf(p->out, " scratch %" PRId64 " %" PRId64, g->scratch_offset, g->scratch_bytes);
  }
  if (g->stage != PM_TRACED) pm_putf(p->out, " target %s", g->target->text);
  pm_putf(p->out, " stage %s {\n", stages[g->stage]);
}

static void number_block(printer *p, pm_blk block) {
  const pm_block *b = &p->g->blocks.at[block];
  for (uint32_t k = 0; k < b->n_args; k++) p->number[b->arg + k] = ++p->n_numbers;
  for (uint32_t k = 0; k < b->ops.n; k++) {
    const pm_op *o = pm_get(p->g, b->ops.at[k]);
    for (uint32_t i = 0; i < o->n_out; i++) p->number[o->out + i] = ++p->n_numbers;
    for (uint32_t i = 0; i < o->n_regions; i++) number_block(p, pm_region(p->g, b->ops.at[k], i));
  }
}

const uint32_t *pm_number_values(const pm_graph *g, pm_arena *a, uint32_t *n) {
  printer p = {.g = g, .number = PM_NEW(a, uint32_t, g->values.n + 1)};
  number_block(&p, 1);
  *n = p.n_numbers;
  return p.number;
}

void pm_print(const pm_graph *g, pm_text *out) {
  printer p = {.g = g, .out = out};
  p.number = PM_NEW(out->arena, uint32_t, g->values.n);
  put_head(&p);
  for (uint32_t k = 0; k < g->warnings.n; k++) {
    pm_put(out, "  warning ");
    put_string(out, g->warnings.at[k]);
    pm_put(out, "\n");
  }
  put_block(&p, 1, 1);
  pm_put(out, "}\n");
}
