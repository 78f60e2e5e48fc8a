/* Is this a valid graph? Safe for anything that a parser may read or a pass may break.
 *
 * One walk in program order from block 1. Before anything is inspected, every index in it has been
 * checked, so that nothing later (rules, printing, passes) can leave its array. Dominance: a value
 * is visible from its op to the end of that op's block, so visible values form a stack, and closing
 * a block truncates the stack. The type of each result is computed again by its rule and compared.
 */
#include <inttypes.h>

#include "access.h"
#include "layout.h"
#include "rules.h"
#include "view.h"

enum { MAX_NESTING = 64 };

typedef struct checker {
  const pm_graph *g;
  pm_err *err;
  uint8_t *op_seen, *block_seen, *visible;
  PM_VEC(pm_val) stack; /* visible values, oldest first */
  int depth;
  uint32_t asked, taken; /* counters of NEXT_TILE, of FETCH_TILE */
} checker;

static pm_code check_block(checker *c, pm_blk block, bool body);

#define BAD(...) return pm_fail(c->err, PM_E_INTERNAL, "malformed graph: " __VA_ARGS__)

static const char *text_of(const checker *c, pm_opid op) {
  return pm_ops[pm_get(c->g, op)->code].text;
}

/* [first, first + n) lies in an array of `size` words */
static bool in_array(uint64_t first, uint64_t n, uint64_t size) { return first + n <= size; }

/* ---- the graph's own fields --------------------------------------------------------------- */

static pm_code check_extents(checker *c, const char *what, const int64_t *dim, uint32_t n) {
  for (uint32_t k = 0; k < n; k++) {
    if (dim[k] < 1 || dim[k] > INT32_MAX) {
      return pm_fail(c->err, PM_E_VALUE,
                     "%s %u has size %" PRId64 "; it is at least 1 and less than 2**31", what, k,
                     dim[k]);
    }
  }
  return PM_OK;
}

static pm_code check_aliases(checker *c) {
  const pm_graph *g = c->g;
  for (uint32_t k = 0; g->alias && k < g->n_outputs; k++) {
    if (g->alias[k] < -1 || g->alias[k] >= (int64_t)g->n_operands) BAD("alias of output %u", k);
  }
  return PM_OK;
}

static pm_code check_args(checker *c) {
  const pm_graph *g = c->g;
  const pm_block *body = &g->blocks.at[1];
  if (body->n_args != (uint64_t)g->n_operands + g->n_outputs) {
    BAD("the kernel has %u arguments, but %u operands and %u outputs", body->n_args, g->n_operands,
        g->n_outputs);
  }
  for (uint32_t k = 0; k < body->n_args; k++) {
    const pm_type *t = &g->values.at[body->arg + k].type;
    if (t->kind != PM_REF || t->space != PM_GMEM) BAD("kernel argument %u is not a ref in GMEM", k);
  }
  return PM_OK;
}

static pm_code check_head(checker *c) {
  const pm_graph *g = c->g;
  if (!g->values.n || !g->ops.n || g->blocks.n < 2 || !g->strings.n || !g->layouts.n ||
      !g->lists.n || g->lists.at[0]) {
    BAD("the reserved first elements are missing");
  }
  if (g->n_grid > PM_MAX_RANK || g->n_cluster > 3 || g->n_mesh > PM_MAX_RANK) {
    BAD("too many axes of the grid, the cluster or the mesh");
  }
  if (g->n_threads < 1 || g->n_threads > 8) {
    return pm_fail(c->err, PM_E_VALUE, "num_threads is %u; 1 to 8 are accepted", g->n_threads);
  }
  if (g->stage > PM_SYNCED) BAD("stage %d", g->stage);
  pm_code rc = check_extents(c, "grid axis", g->grid, g->n_grid);
  if (!rc) rc = check_extents(c, "cluster axis", g->cluster, g->n_cluster);
  if (!rc) rc = check_extents(c, "mesh axis", g->mesh, g->n_mesh);
  if (!rc && pm_n_devices(g) > PM_MAX_DEVICES) {
    return pm_fail(c->err, PM_E_VALUE, "the mesh has %" PRId64 " devices; at most %d are accepted",
                   pm_n_devices(g), PM_MAX_DEVICES);
  }
  return rc ? rc : check_aliases(c);
}

/* ---- values ------------------------------------------------------------------------------- */

static pm_code check_layout(checker *c, pm_val v, const char *what) {
  const pm_graph *g = c->g;
  const pm_value *value = pm_value_of(g, v);
  if (value->layout >= g->layouts.n) BAD("%s: layout %u does not exist", what, value->layout);
  if (value->type.kind != PM_ARRAY || !value->type.rank) return PM_OK;
  if (!value->layout) {
    if (g->stage >= PM_LAID_OUT) BAD("%s has no layout", what);
    return PM_OK;
  }
  const pm_layout *l = pm_layout_of(g, value->layout);
  if (l->kind > PM_TILED || l->rank != value->type.rank ||
      memcmp(l->shape, value->type.dim, sizeof(int64_t) * l->rank)) {
    BAD("%s: its layout is for another shape", what);
  }
  return PM_OK;
}

/* A value that is a result or an argument: where it says it is, well-formed, now visible. */
static pm_code define(checker *c, pm_val v, pm_opid def, pm_blk block, uint32_t index,
                      const char *what) {
  const pm_value *value = pm_value_of(c->g, v);
  if (c->visible[v] || value->def != def || value->block != block || value->index != index) {
    BAD("value %u (%s) is defined elsewhere", v, what);
  }
  if (value->name >= c->g->strings.n) BAD("%s: name %u does not exist", what, value->name);
  pm_code rc = pm_type_check(c->g, &value->type, what, c->err);
  if (!rc) rc = check_layout(c, v, what);
  if (rc) return rc;
  c->visible[v] = 1;
  pm_vec_push(c->g->arena, &c->stack, v);
  return PM_OK;
}

static void close_to(checker *c, uint32_t mark) {
  while (c->stack.n > mark) c->visible[c->stack.at[--c->stack.n]] = 0;
}

/* ---- attributes beyond the rules ---------------------------------------------------------- */

static pm_code check_axis(checker *c, pm_opid op) {
  const pm_graph *g = c->g;
  int64_t kind = *pm_attr(g, op, PM_ATTR_AXIS), dim = *pm_attr(g, op, PM_ATTR_DIM);
  int64_t n = kind == PM_AXIS_GRID      ? g->n_grid
              : kind == PM_AXIS_CLUSTER ? g->n_cluster
              : kind == PM_AXIS_DEVICE  ? g->n_mesh
                                        : 1;
  if (dim >= 0 && dim < n) return PM_OK;
  return pm_fail(c->err, PM_E_VALUE, "axis: there is no %s axis %" PRId64 ", there are %" PRId64,
                 pm_enum_text(PM_ENUM_AXIS, kind), dim, n);
}

static pm_code check_alloc(checker *c, pm_opid op) {
  const pm_graph *g = c->g;
  pm_opid scope = g->blocks.at[pm_get(g, op)->parent].parent;
  if (!scope || pm_get(g, scope)->code != PM_OP_SCOPE) BAD("%s outside a scope", text_of(c, op));
  if (!pm_has_attr(g, op, PM_ATTR_OFFSET)) return PM_OK;
  int64_t offset = *pm_attr(g, op, PM_ATTR_OFFSET);
  if (offset < (g->stage >= PM_PLANNED ? 0 : -1) || offset > INT32_MAX) {
    BAD("%s: offset %" PRId64, text_of(c, op), offset);
  }
  return PM_OK;
}

static pm_code check_engine(checker *c, pm_opid op) {
  if (!pm_has_attr(c->g, op, PM_ATTR_ENGINE)) return PM_OK;
  if (c->g->stage >= PM_PLANNED && *pm_attr(c->g, op, PM_ATTR_ENGINE) == PM_ENGINE_AUTO) {
    BAD("%s: no engine", text_of(c, op));
  }
  return PM_OK;
}

/* Operands are read-only; what a caller passes is never changed. */
static pm_code check_writable(checker *c, pm_opid op, pm_val view) {
  const pm_graph *g = c->g;
  const pm_value *v = pm_value_of(g, pm_view_base(g, view));
  if (v->def || v->block != 1 || v->index >= g->n_operands) return PM_OK;
  for (uint32_t i = 0; g->alias && i < g->n_outputs; i++) {
    if (g->alias[i] == (int32_t)v->index) return PM_OK;
  }
  return pm_fail(c->err, PM_E_VALUE,
                 "%s: the ref %s is operand %u of the kernel, which is read-only; write to an "
                 "output (out_type=)",
                 pm_op_name(pm_get(g, op)->code), g->strings.at[v->name], v->index);
}

/* Source text gets operands as pointers to const. */
static pm_code check_accesses(checker *c, pm_opid op) {
  pm_access a = pm_accesses(op);
  while (pm_next_access(c->g, &a)) {
    if (!a.writes || a.where != PM_IN_GMEM || a.certainty == PM_UNTOLD) continue;
    const pm_code rc = check_writable(c, op, a.view);
    if (rc) return rc;
  }
  return PM_OK;
}

/* A launch may have fewer blocks than the grid, and counts its tiles from there. */
static pm_code check_counter(checker *c, pm_opid op) {
  const int64_t n = *pm_attr(c->g, op, PM_ATTR_N);
  const bool takes = pm_get(c->g, op)->code == PM_OP_FETCH_TILE;
  *(takes ? &c->taken : &c->asked) |= UINT32_C(1) << n;
  if (!(c->taken & c->asked)) return PM_OK;
  return pm_fail(c->err, PM_E_VALUE,
                 "TileScheduler: counter %" PRId64
                 " is that of a dynamic_scheduling_loop; use another "
                 "number",
                 n);
}

/* A counter goes on where it is in a second round of an outer loop, and few points would be left.
 */
static pm_code check_take(checker *c, pm_opid op) {
  const pm_graph *g = c->g;
  uint32_t loops = 0;
  for (pm_blk b = pm_get(g, op)->parent; g->blocks.at[b].parent;) {
    const pm_opid parent = g->blocks.at[b].parent;
    loops += pm_is_loop(pm_get(g, parent)->code);
    b = pm_get(g, parent)->parent;
  }
  if (loops <= 1 || pm_get(g, op)->n_in) return check_counter(c, op);
  BAD("fetch_tile inside two loops needs to know which round it is");
}

/* What one lane alone learnt from an op, such as a FETCH_TILE. */
static bool is_ticket(const pm_graph *g, pm_val v) {
  const pm_opid def = pm_value_of(g, v)->def;
  return def && pm_ops[pm_get(g, def)->code].participants == PM_BY_LANE;
}

static pm_code check_tickets(checker *c, pm_opid op) {
  const pm_graph *g = c->g;
  const pm_op *o = pm_get(g, op);
  for (uint32_t k = 0; k < o->n_in; k++) {
    const bool ticket = is_ticket(g, pm_in(g, op, k));
    if (ticket ? pm_operand_of(o->code, k)->letter != 't' : o->code == PM_OP_SHUFFLE_TILE) {
      BAD("%s: operand %u and fetch_tile", text_of(c, op), k);
    }
  }
  bool alone = g->n_threads == 1;
  for (uint32_t k = 0; k < g->n_cluster; k++) alone &= g->cluster[k] == 1;
  if (o->code == PM_OP_SHUFFLE_TILE && !alone) BAD("shuffle_tile in a cluster of several threads");
  return PM_OK;
}

static pm_code check_special(checker *c, pm_opid op) {
  const uint16_t code = pm_get(c->g, op)->code;
  if (code == PM_OP_AXIS) return check_axis(c, op);
  if (code == PM_OP_FETCH_TILE) return check_take(c, op);
  if (pm_ops[code].effects & E_COUNT) return check_counter(c, op);
  return pm_ops[code].effects & E_ALLOC ? check_alloc(c, op) : PM_OK;
}

/* ---- layouts ------------------------------------------------------------------------------ */

static pm_code agree(checker *c, pm_opid op, pm_val a, pm_val b, bool splat_fits) {
  const pm_graph *g = c->g;
  const pm_value *x = pm_value_of(g, a), *y = pm_value_of(g, b);
  if (x->type.kind != PM_ARRAY || !x->type.rank || x->layout == y->layout) return PM_OK;
  if (splat_fits && pm_layout_of(g, x->layout)->kind == PM_SPLAT) return PM_OK;
  BAD("%s: layouts of values %u and %u do not agree", text_of(c, op), a, b);
}

static pm_code agree_yield(checker *c, pm_opid op, uint32_t region) {
  const pm_graph *g = c->g;
  const pm_op *o = pm_get(g, op);
  pm_opid yield = pm_terminator(g, pm_region(g, op, region));
  for (uint32_t k = 0; k < o->n_out; k++) {
    pm_code rc = agree(c, op, pm_in(g, yield, k), o->out + k, false);
    if (rc) return rc;
  }
  return PM_OK;
}

static pm_code agree_carries(checker *c, pm_opid op, uint32_t region) {
  const pm_graph *g = c->g;
  const pm_op *o = pm_get(g, op);
  const pm_block *b = &g->blocks.at[pm_region(g, op, region)];
  for (uint32_t k = 0; k < o->n_out; k++) {
    pm_code rc = agree(c, op, pm_in(g, op, o->n_in - o->n_out + k), o->out + k, false);
    if (!rc) rc = agree(c, op, b->arg + b->n_args - o->n_out + k, o->out + k, false);
    if (rc) return rc;
  }
  return PM_OK;
}

static pm_code check_layouts(checker *c, pm_opid op) {
  const pm_graph *g = c->g;
  const pm_op *o = pm_get(g, op);
  pm_code rc = PM_OK;
  if (pm_ops[o->code].layout == PM_LAY_POINTWISE) {
    for (uint32_t k = 0; !rc && k < o->n_in; k++) rc = agree(c, op, pm_in(g, op, k), o->out, true);
  }
  if (pm_ops[o->code].layout == PM_LAY_MASKED) {
    const pm_val shared = pm_masked_shared(g, op);
    for (uint32_t k = 1; !rc && k < o->n_in; k++) rc = agree(c, op, pm_in(g, op, k), shared, true);
  }
  const bool loop = pm_is_loop(o->code);
  for (uint32_t r = 0; !rc && r < o->n_regions; r++) {
    if (loop) rc = agree_carries(c, op, r);
    if (!rc && !pm_is_condition(o, r)) rc = agree_yield(c, op, r);
  }
  return rc;
}

/* ---- ops ---------------------------------------------------------------------------------- */

/* Everything about an op that can be seen without looking at what it refers to. */
static pm_code check_words(checker *c, pm_opid op, pm_blk block) {
  const pm_graph *g = c->g;
  if (!op || op >= g->ops.n || c->op_seen[op]) BAD("op %u of block %u", op, block);
  c->op_seen[op] = 1;
  const pm_op *o = pm_get(g, op);
  if (o->code <= PM_OP_NONE || o->code >= PM_OP_COUNT) BAD("op %u has code %u", op, o->code);
  const pm_op_info *info = &pm_ops[o->code];
  if (o->parent != block) BAD("%s lies in another block", info->text);
  if (o->file >= g->strings.n) BAD("%s: its file is not interned", info->text);
  if (!in_array(o->in, o->n_in, g->operands.n) ||
      !in_array(o->regions, o->n_regions, g->region_blocks.n) ||
      !in_array(o->attr, info->n_attrs, g->attrs.n) ||
      (o->n_out && (!o->out || !in_array(o->out, o->n_out, g->values.n)))) {
    BAD("%s: operands, results, regions or attributes out of range", info->text);
  }
  if (info->out != PM_VARIABLE && o->n_out != info->out)
    BAD("%s: %u results", info->text, o->n_out);
  if (info->regions == PM_VARIABLE ? !o->n_regions : o->n_regions != info->regions) {
    BAD("%s: %u regions", info->text, o->n_regions);
  }
  for (uint32_t k = 0; k < o->n_in; k++) {
    pm_val v = pm_in(g, op, k);
    if (!v || v >= g->values.n || !c->visible[v]) {
      BAD("%s: operand %u (value %u) is not defined before it", info->text, k, v);
    }
  }
  return PM_OK;
}

static pm_code check_region_args(checker *c, pm_opid op, uint32_t k) {
  const pm_graph *g = c->g;
  const pm_block *b = &g->blocks.at[pm_region(g, op, k)];
  uint32_t n = pm_region_args(g, op);
  if (b->n_args != n)
    BAD("%s: region %u has %u arguments, not %u", text_of(c, op), k, b->n_args, n);
  for (uint32_t arg = 0; arg < n; arg++) {
    pm_type want = pm_region_arg_type(g, op, arg);
    if (!pm_type_equal(pm_typeof(g, b->arg + arg), &want)) {
      BAD("%s: argument %u of region %u has the wrong type", text_of(c, op), arg, k);
    }
  }
  return PM_OK;
}

static pm_code check_regions(checker *c, pm_opid op) {
  const pm_graph *g = c->g;
  for (uint32_t k = 0; k < pm_get(g, op)->n_regions; k++) {
    pm_blk region = pm_region(g, op, k);
    if (region < 2 || region >= g->blocks.n || c->block_seen[region]) {
      BAD("%s: region %u (block %u)", text_of(c, op), k, region);
    }
    if (g->blocks.at[region].parent != op) BAD("block %u belongs elsewhere", region);
    if (c->depth == MAX_NESTING) {
      return pm_fail(c->err, PM_E_NOT_IMPLEMENTED,
                     "more than %d nested loops, branches and scopes; take some of them apart",
                     MAX_NESTING);
    }
    c->depth++;
    pm_code rc = check_block(c, region, false);
    c->depth--;
    if (!rc) rc = check_region_args(c, op, k);
    if (rc) return rc;
  }
  return pm_type_yields(g, op, c->err);
}

static pm_code check_results(checker *c, pm_opid op, const pm_type *type) {
  const pm_graph *g = c->g;
  const pm_op *o = pm_get(g, op);
  uint32_t n = pm_ops[o->code].out == PM_VARIABLE ? pm_control_results(g, op) : o->n_out;
  if (o->n_out != n) BAD("%s: %u results instead of %u", text_of(c, op), o->n_out, n);
  for (uint32_t k = 0; k < n; k++) {
    pm_code rc = define(c, o->out + k, op, o->parent, k, text_of(c, op));
    if (rc) return rc;
    pm_type want = o->n_regions ? pm_control_result_type(g, op, k) : *type;
    if (!pm_type_equal(pm_typeof(g, o->out + k), &want)) {
      BAD("%s: its result is %s, by its rule it is %s", text_of(c, op),
          pm_type_text(g->arena, pm_typeof(g, o->out + k)), pm_type_text(g->arena, &want));
    }
  }
  return PM_OK;
}

static pm_code check_op(checker *c, pm_opid op, pm_blk block) {
  const pm_graph *g = c->g;
  pm_code rc = check_words(c, op, block);
  if (rc) return rc;
  const pm_op *o = pm_get(g, op);
  const pm_type *given = o->n_out ? pm_typeof(g, o->out) : NULL;
  pm_type type;
  pm_typing t = {g, o->code, g->operands.at + o->in, o->n_in, g->attrs.at + o->attr, given, c->err};
  rc = pm_type_op(&t, &type);
  if (!rc) rc = check_special(c, op);
  if (!rc) rc = check_accesses(c, op);
  if (!rc) rc = check_engine(c, op);
  if (!rc) rc = check_tickets(c, op);
  if (!rc && o->n_regions) rc = check_regions(c, op);
  if (!rc) rc = check_results(c, op, &type);
  if (!rc && g->stage >= PM_LAID_OUT) rc = check_layouts(c, op);
  return rc;
}

static pm_code check_block(checker *c, pm_blk block, bool body) {
  const pm_graph *g = c->g;
  const pm_block *b = &g->blocks.at[block];
  uint32_t mark = c->stack.n;
  c->block_seen[block] = 1;
  if (b->n_args && (!b->arg || !in_array(b->arg, b->n_args, g->values.n))) {
    BAD("arguments of block %u", block);
  }
  for (uint32_t k = 0; k < b->n_args; k++) {
    pm_code rc = define(c, b->arg + k, 0, block, k, "argument");
    if (rc) return rc;
  }
  for (uint32_t k = 0; k < b->ops.n; k++) {
    pm_code rc = check_op(c, b->ops.at[k], block);
    if (rc) {
      if (b->ops.at[k] && b->ops.at[k] < g->ops.n && pm_get(g, b->ops.at[k])->file < g->strings.n) {
        pm_err_op(c->err, g, b->ops.at[k]);
      }
      return rc;
    }
    bool yield = pm_get(g, b->ops.at[k])->code == PM_OP_YIELD;
    if (yield && (body || k + 1 < b->ops.n)) BAD("a yield inside block %u", block);
    if (!yield && !body && k + 1 == b->ops.n) BAD("block %u has no yield", block);
  }
  if (!body && !b->ops.n) BAD("block %u is empty", block);
  if (!body) close_to(c, mark);
  return PM_OK;
}

/* The output has room for all traces. */
static pm_code check_profile(checker *c) {
  const pm_graph *g = c->g;
  if (!g->profile_words) return PM_OK;
  if (g->profile_words < PM_PROFILE_HEAD || g->profile_words > UINT16_MAX ||
      g->profile_output >= g->n_outputs) {
    BAD("profile %lld", (long long)g->profile_words);
  }
  int64_t rows = pm_profile_traces(g);
  for (uint32_t k = 0; k < g->n_cluster; k++) rows *= g->cluster[k];
  for (uint32_t k = 0; k < g->n_grid; k++) rows *= g->grid[k];
  const pm_type *t = pm_typeof(g, g->blocks.at[1].arg + g->n_operands + g->profile_output);
  if (t->dtype != PM_I32 || t->rank != 2 || t->dim[0] != rows ||
      t->dim[1] != g->profile_words + PM_PROFILE_TAIL) {
    BAD("the output of the profiler");
  }
  return PM_OK;
}

pm_code pm_verify(const pm_graph *g, pm_err *err) {
  checker c = {.g = g, .err = err};
  pm_code rc = check_head(&c);
  if (rc) return rc;
  c.op_seen = PM_NEW(g->arena, uint8_t, g->ops.n);
  c.block_seen = PM_NEW(g->arena, uint8_t, g->blocks.n);
  c.visible = PM_NEW(g->arena, uint8_t, g->values.n);
  if (g->blocks.at[1].parent) return pm_fail(err, PM_E_INTERNAL, "malformed graph: block 1");
  rc = check_block(&c, 1, true);
  if (!rc) rc = check_args(&c);
  return rc ? rc : check_profile(&c);
}
