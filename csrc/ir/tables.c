/* The tables of the .def files: ops, attributes, enums. A row with a missing column does not
 * compile. */
#include "rules.h"

#define V PM_VARIABLE
#define PM_OP(id, text, in, names, out, regions, attrs, type, lay, effects, part, known, done, \
              warp, needs, doc)                                                                \
  _Static_assert(sizeof((uint8_t[]){attrs 0}) <= PM_MAX_ATTRS, "too many attributes");
#include "ops.def"
#undef PM_OP

const pm_op_info pm_ops[PM_OP_COUNT] = {
    [PM_OP_NONE] = {.text = "none", .in = "", .names = ""},
#define PM_OP(id, op_text, operands, operand_names, results, n_regions, list, type, lay, flags, p, \
              k, d, w, a, doc)                                                                     \
  [PM_OP_##id] = {.text = op_text,                                                                 \
                  .in = operands,                                                                  \
                  .names = operand_names,                                                          \
                  .out = results,                                                                  \
                  .regions = n_regions,                                                            \
                  .n_attrs = sizeof((uint8_t[]){list 0}) - 1,                                      \
                  .attrs = {list 0},                                                               \
                  .layout = PM_LAY_##lay,                                                          \
                  .participants = PM_BY_##p,                                                       \
                  .known_to = PM_KNOWN_##k,                                                        \
                  .completion = PM_COMPLETES_##d,                                                  \
                  .warp = w,                                                                       \
                  .needs = 0 a,                                                                    \
                  .effects = flags},
#include "ops.def"
#undef PM_OP
};
#undef V

pm_op_lookup pm_op_lookups[PM_OP_COUNT];

static const char *read_operand(const char *spec, pm_operand *out) {
  *out = (pm_operand){.letter = *spec++};
  if (*spec && strchr("<>=!", *spec)) out->role = *spec++;
  if (*spec == '~') out->async = *spec++;
  if (*spec == '@') out->remote = *spec++;
  if (*spec == '^') out->everywhere = *spec++;
  if (*spec == '*') out->repeated = *spec++;
  else if (*spec == '?') out->optional = *spec++;
  return spec;
}

__attribute__((constructor)) static void read_columns(void) {
  for (int code = 0; code < PM_OP_COUNT; code++) {
    const pm_op_info *info = &pm_ops[code];
    pm_op_lookup *op = &pm_op_lookups[code];
    for (const char *spec = info->in; *spec;) {
      assert(op->n_operands < PM_MAX_OPERANDS);
      spec = read_operand(spec, &op->operand[op->n_operands]);
      op->touches |= op->operand[op->n_operands++].role;
    }
    op->touches |= info->effects & E_COUNT;
    memset(op->slot, -1, sizeof op->slot);
    for (int8_t k = 0; k < info->n_attrs; k++) op->slot[info->attrs[k]] = k;
  }
}

const pm_space_info pm_spaces[PM_SPACE_COUNT] = {
#define PM_SPACE(id, prefix, python, by_address) \
  [PM_##id] = {.text = prefix, .member = python, .addressed = by_address},
#include "spaces.def"
#undef PM_SPACE
};

const char *const pm_attr_text[PM_ATTR_COUNT] = {
    [PM_ATTR_NONE] = "",
#define PM_ATTR(id, text, kind) [PM_ATTR_##id] = text,
#include "attrs.def"
#undef PM_ATTR
};

const uint8_t pm_attr_forms[PM_ATTR_COUNT] = {
#define PM_ATTR(id, text, kind) [PM_ATTR_##id] = PM_FORM_##kind,
#include "attrs.def"
#undef PM_ATTR
};

#define V(name, id, text) text,
#define PM_ENUM(name, values) static const char *const text_##name[] = {values};
#include "enums.def"
#undef PM_ENUM
#undef V

const char *pm_enum_text(pm_enum f, int64_t value) {
  static const struct {
    const char *const *text;
    int64_t n;
  } enums[] = {
#define V(name, id, text)
#define PM_ENUM(name, values) {text_##name, PM_COUNT(text_##name)},
#include "enums.def"
#undef PM_ENUM
#undef V
  };
  if ((size_t)f >= PM_COUNT(enums) || value < 0 || value >= enums[f].n) return NULL;
  return enums[f].text[value];
}

const char *pm_op_name(int code) {
  switch (code) {
#define PM_OP_NAME(id, name) \
  case PM_OP_##id:           \
    return name;
#include "op_names.def"
#undef PM_OP_NAME
    default: return pm_ops[code].text;
  }
}

int pm_op_find(const char *text, size_t n) {
  for (int k = 1; k < PM_OP_COUNT; k++) {
    if (strlen(pm_ops[k].text) == n && !memcmp(pm_ops[k].text, text, n)) return k;
  }
  return 0;
}
