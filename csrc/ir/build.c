/* Building the graph: arrays of words that only grow, addressed by index.
 *
 * pm_emit writes the attributes of the new op first, at the end of graph.attrs and
 * graph.lists, lets the type rules read them there, and truncates both arrays if a rule refuses the
 * op: a failure leaves no trace. */
#include <assert.h>

#include "rules.h"

/* ---- values, blocks, operands ------------------------------------------------------------- */

static pm_val new_value(pm_graph *g, const pm_type *type, pm_opid def, pm_blk block,
                        uint32_t index) {
  pm_value v = {.type = *type, .def = def, .block = block, .index = index};
  pm_vec_push(g->arena, &g->values, v);
  return g->values.n - 1;
}

pm_val pm_add_arg(pm_graph *g, pm_blk block, const pm_type *type) {
  pm_val v = new_value(g, type, 0, block, g->blocks.at[block].n_args);
  pm_block *b = &g->blocks.at[block];
  if (!b->n_args) b->arg = v;
  assert(v == b->arg + b->n_args);
  b->n_args++;
  return v;
}

static uint32_t add_operands(pm_graph *g, const pm_val *in, uint32_t n) {
  uint32_t first = g->operands.n;
  for (uint32_t k = 0; k < n; k++) pm_vec_push(g->arena, &g->operands, in[k]);
  return first;
}

static void add_results(pm_graph *g, pm_opid op, const pm_type *type, uint32_t n) {
  pm_blk parent = g->ops.at[op].parent;
  g->ops.at[op].n_out = n;
  g->ops.at[op].out = n ? g->values.n : 0;
  for (uint32_t k = 0; k < n; k++) new_value(g, &type[k], op, parent, k);
}

/* ---- attributes --------------------------------------------------------------------------- */

static int64_t add_list(pm_graph *g, const int64_t *list, uint32_t n) {
  if (!n) return 0;
  int64_t first = g->lists.n;
  pm_vec_push(g->arena, &g->lists, n);
  for (uint32_t k = 0; k < n; k++) pm_vec_push(g->arena, &g->lists, list[k]);
  return first;
}

static const pm_attr_arg *find_arg(const pm_attr_arg *attrs, uint32_t n, uint8_t id) {
  for (uint32_t k = 0; k < n; k++) {
    if (attrs[k].id == id) return &attrs[k];
  }
  return NULL;
}

static uint32_t add_attrs(pm_graph *g, pm_opcode code, const pm_attr_arg *attrs, uint32_t n) {
  const pm_op_info *info = &pm_ops[code];
  uint32_t first = g->attrs.n;
  for (uint32_t k = 0; k < info->n_attrs; k++) {
    uint8_t id = info->attrs[k];
    const pm_attr_arg *arg = find_arg(attrs, n, id);
    int64_t word = id == PM_ATTR_OFFSET ? -1 : 0;
    if (arg) word = pm_attr_forms[id] == PM_FORM_LIST ? add_list(g, arg->list, arg->n) : arg->i;
    pm_vec_push(g->arena, &g->attrs, word);
  }
  return first;
}

void pm_set_list(pm_graph *g, pm_opid op, pm_attr_id id, const int64_t *list, uint32_t n) {
  int64_t at = add_list(g, list, n);
  *pm_attr(g, op, id) = at;
}

/* ---- ops ---------------------------------------------------------------------------------- */

static pm_opid new_op(pm_graph *g, pm_opcode code, pm_blk parent, const pm_val *in, uint32_t n_in,
                      uint32_t attr, uint32_t file, uint32_t line) {
  pm_op op = {.code = (uint16_t)code,
              .in = add_operands(g, in, n_in),
              .n_in = n_in,
              .attr = attr,
              .parent = parent,
              .file = file,
              .line = line};
  pm_vec_push(g->arena, &g->ops, op);
  return g->ops.n - 1;
}

static void append(pm_graph *g, pm_blk block, pm_opid op) {
  pm_vec_push(g->arena, &g->blocks.at[block].ops, op);
}

static pm_code at_builder(pm_builder *b, pm_err *err) {
  if (b->line) pm_err_at(err, b->g->strings.at[b->file], b->line);
  return err->code;
}

static bool terminated(const pm_graph *g, pm_blk block) {
  const pm_block *b = &g->blocks.at[block];
  return b->ops.n && g->ops.at[b->ops.at[b->ops.n - 1]].code == PM_OP_YIELD;
}

/* What every new op must satisfy before its rule is asked. */
static pm_code check_new(pm_builder *b, pm_opcode code, const pm_val *in, uint32_t n_in,
                         uint32_t n_regions, const pm_attr_arg *attrs, uint32_t n_attrs,
                         pm_err *err) {
  pm_graph *g = b->g;
  if (code <= PM_OP_NONE || code >= PM_OP_COUNT) {
    return pm_fail(err, PM_E_INTERNAL, "there is no op number %d", (int)code);
  }
  const char *text = pm_op_name(code);
  uint8_t regions = pm_ops[code].regions;
  if (regions == PM_VARIABLE ? !n_regions || n_regions > UINT16_MAX : n_regions != regions) {
    return pm_fail(err, PM_E_INTERNAL, "%s: %u regions", text, n_regions);
  }
  if (!b->block || b->block >= g->blocks.n || terminated(g, b->block)) {
    return pm_fail(err, PM_E_INTERNAL, "%s: the block it goes to is closed", text);
  }
  if (code == PM_OP_YIELD && b->block == 1) {
    return pm_fail(err, PM_E_INTERNAL, "yield: the kernel's body yields nothing");
  }
  for (uint32_t k = 0; k < n_in; k++) {
    if (!in[k] || in[k] >= g->values.n) {
      return pm_fail(err, PM_E_INTERNAL, "%s: operand %u is no value of this graph", text, k);
    }
  }
  for (uint32_t k = 0; k < n_attrs; k++) {
    if ((unsigned)attrs[k].id >= PM_ATTR_COUNT || pm_op_lookups[code].slot[attrs[k].id] < 0) {
      return pm_fail(err, PM_E_INTERNAL, "%s has no attribute %s", text,
                     (unsigned)attrs[k].id < PM_ATTR_COUNT ? pm_attr_text[attrs[k].id] : "?");
    }
  }
  return PM_OK;
}

/* Attributes, operand check and type rule; on failure the graph is as before. */
static pm_code type_new(pm_builder *b, pm_opcode code, const pm_val *in, uint32_t n_in,
                        uint32_t n_regions, const pm_type *given, const pm_attr_arg *attrs,
                        uint32_t n_attrs, uint32_t *attr, pm_type *type, pm_err *err) {
  pm_graph *g = b->g;
  if (check_new(b, code, in, n_in, n_regions, attrs, n_attrs, err)) return at_builder(b, err);
  uint32_t n_words = g->attrs.n, n_lists = g->lists.n;
  *attr = add_attrs(g, code, attrs, n_attrs);
  pm_typing t = {g, code, in, n_in, g->attrs.at + *attr, given, err};
  if (pm_type_op(&t, type)) {
    g->attrs.n = n_words;
    g->lists.n = n_lists;
    return at_builder(b, err);
  }
  return PM_OK;
}

pm_code pm_emit(pm_builder *b, pm_opcode code, const pm_val *in, uint32_t n_in,
                const pm_type *given, const pm_attr_arg *attrs, uint32_t n_attrs, pm_opid *op,
                pm_err *err) {
  uint32_t attr = 0;
  pm_type type;
  pm_code rc = type_new(b, code, in, n_in, 0, given, attrs, n_attrs, &attr, &type, err);
  if (rc) return rc;
  pm_opid id = new_op(b->g, code, b->block, in, n_in, attr, b->file, b->line);
  add_results(b->g, id, &type, pm_ops[code].out);
  append(b->g, b->block, id);
  if (op) *op = id;
  return PM_OK;
}

/* ---- control ------------------------------------------------------------------------------ */

pm_code pm_open(pm_builder *b, pm_opcode code, const pm_val *in, uint32_t n_in, uint32_t n_regions,
                const pm_attr_arg *attrs, uint32_t n_attrs, pm_opid *op, pm_err *err) {
  pm_graph *g = b->g;
  uint32_t attr = 0;
  pm_type type;
  pm_code rc = type_new(b, code, in, n_in, n_regions, NULL, attrs, n_attrs, &attr, &type, err);
  if (rc) return rc;
  pm_opid id = new_op(g, code, b->block, in, n_in, attr, b->file, b->line);
  g->ops.at[id].regions = g->region_blocks.n;
  g->ops.at[id].n_regions = (uint16_t)n_regions;
  for (uint32_t k = 0; k < n_regions; k++) {
    pm_blk region = pm_new_block(g);
    g->blocks.at[region].parent = id;
    pm_vec_push(g->arena, &g->region_blocks, region);
    uint32_t n_args = pm_region_args(g, id);
    for (uint32_t arg = 0; arg < n_args; arg++) {
      pm_type arg_type = pm_region_arg_type(g, id, arg);
      pm_add_arg(g, region, &arg_type);
    }
  }
  append(g, b->block, id);
  *op = id;
  return PM_OK;
}

pm_code pm_yield(pm_builder *b, const pm_val *vals, uint32_t n, pm_err *err) {
  return pm_emit(b, PM_OP_YIELD, vals, n, NULL, NULL, 0, NULL, err);
}

pm_code pm_close(pm_builder *b, pm_opid op, pm_err *err) {
  pm_graph *g = b->g;
  for (uint32_t k = 0; k < g->ops.at[op].n_regions; k++) {
    if (!terminated(g, pm_region(g, op, k))) {
      pm_fail(err, PM_E_INTERNAL, "%s: region %u has no yield", pm_op_name(g->ops.at[op].code), k);
      return at_builder(b, err);
    }
  }
  if (pm_type_yields(g, op, err)) return at_builder(b, err);
  uint32_t n = pm_control_results(g, op);
  g->ops.at[op].n_out = n;
  g->ops.at[op].out = n ? g->values.n : 0;
  for (uint32_t k = 0; k < n; k++) {
    pm_type type = pm_control_result_type(g, op, k);
    new_value(g, &type, op, g->ops.at[op].parent, k);
  }
  return PM_OK;
}

static void forget_op(pm_graph *g, pm_opid op) {
  pm_op *o = pm_get(g, op);
  for (uint32_t r = 0; r < o->n_regions; r++) {
    pm_block *b = &g->blocks.at[g->region_blocks.at[o->regions + r]];
    for (uint32_t k = 0; k < b->ops.n; k++) forget_op(g, b->ops.at[k]);
    for (uint32_t k = 0; k < b->n_args; k++) g->values.at[b->arg + k] = (pm_value){0};
    *b = (pm_block){0};
  }
  for (uint32_t k = 0; k < o->n_out; k++) g->values.at[o->out + k] = (pm_value){0};
  *o = (pm_op){0};
}

void pm_abandon(pm_builder *b, pm_opid op) {
  pm_block *parent = &b->g->blocks.at[pm_get(b->g, op)->parent];
  assert(parent->ops.n && parent->ops.at[parent->ops.n - 1] == op);
  parent->ops.n--;
  forget_op(b->g, op);
}

static pm_opid put_in(pm_graph *g, pm_blk block, uint32_t at, pm_opid id) {
  append(g, block, id);
  pm_block *b = &g->blocks.at[block];
  assert(at < b->ops.n);
  memmove(&b->ops.at[at + 1], &b->ops.at[at], sizeof(pm_opid) * (b->ops.n - 1 - at));
  b->ops.at[at] = id;
  return id;
}

pm_opid pm_insert(pm_graph *g, pm_blk block, uint32_t at, pm_opcode code, const pm_val *in,
                  uint32_t n_in, const pm_type *out, uint32_t n_out, const pm_attr_arg *attrs,
                  uint32_t n_attrs, pm_opid place_of) {
  uint32_t attr = add_attrs(g, code, attrs, n_attrs);
  uint32_t file = g->ops.at[place_of].file, line = g->ops.at[place_of].line;
  pm_opid id = new_op(g, code, block, in, n_in, attr, file, line);
  add_results(g, id, out, n_out);
  return put_in(g, block, at, id);
}

pm_opid pm_insert_like(pm_graph *g, pm_blk block, uint32_t at, pm_opid like, const pm_val *in) {
  const pm_op o = g->ops.at[like];
  const pm_type out = *pm_typeof(g, o.out);
  const uint32_t attr = g->attrs.n;
  for (uint32_t k = 0; k < pm_ops[o.code].n_attrs; k++) {
    const int64_t word = g->attrs.at[o.attr + k];
    pm_vec_push(g->arena, &g->attrs, word);
  }
  pm_opid id = new_op(g, o.code, block, in, o.n_in, attr, o.file, o.line);
  add_results(g, id, &out, 1);
  return put_in(g, block, at, id);
}

/* ---- reading ------------------------------------------------------------------------------ */

pm_val pm_insert_value(pm_graph *g, pm_opid before, pm_opcode code, const pm_val *in, uint32_t n_in,
                       const pm_type *out, const pm_attr_arg *attrs, uint32_t n_attrs,
                       pm_opid place_of) {
  const pm_opid op = pm_insert(g, pm_get(g, before)->parent, pm_position(g, before), code, in, n_in,
                               out, 1, attrs, n_attrs, place_of);
  return pm_get(g, op)->out;
}

pm_val pm_insert_number(pm_graph *g, pm_opid before, int64_t number, pm_opid place_of) {
  const pm_type t = pm_scalar_type(PM_I32);
  const pm_attr_arg value = {.id = PM_ATTR_VALUE, .i = number};
  return pm_insert_value(g, before, PM_OP_CONST, NULL, 0, &t, &value, 1, place_of);
}
