/* Checks of code in which threads and warps may diverge.
 *
 * In a WARP_MAP each warp runs independently. Only scalars exist there, and only the ops that
 * ops.def allows.
 *
 * Ordered sections: all sections of a kernel must have the same participants, because the named
 * barriers are assigned once. Number 0 is the block's, then there is one for each thread and one
 * for each participant.
 *
 * Named barriers of the user follow these. Their numbers may be traced: what can be proved is
 * checked here, the interpreter checks the rest.
 *
 * A reduction by any_in_warp may differ between the warps of a thread. It may therefore only decide
 * IFs in which each lane works on its own registers: no memory, no barriers, nothing that the lanes
 * of a thread do together. */
#include "passes.h"

enum { NAMED_BARRIERS = 16 };

typedef struct checker {
  pm_err *err;
  pm_code code;
  int64_t section; /* threads that enter ordered sections, 0: none do */
  int64_t named;   /* the largest number of a named barrier of the user, -1: none */
  pm_opid namer;   /* where it is used */
  pm_opid warps;   /* the WARP_MAP being checked */
} checker;

static void fail(checker *c, pm_graph *g, pm_opid op, const char *why) {
  if (c->code) return;
  c->code = pm_fail(c->err, PM_E_VALUE, "%s", why);
  pm_err_op(c->err, g, op);
}

static void check_section(checker *c, pm_graph *g, pm_opid op) {
  const int64_t n = *pm_attr(g, op, PM_ATTR_N);
  if (c->section && c->section != n) {
    fail(c, g, op,
         pm_printf(g->arena,
                   "ordered_section: %lld threads take turns here, %lld elsewhere in the kernel",
                   (long long)n, (long long)c->section));
  }
  if (g->n_threads + 1 + n > NAMED_BARRIERS) {
    fail(
        c, g, op,
        pm_printf(g->arena, "ordered_section: %lld threads of %u; together at most %d are possible",
                  (long long)n, g->n_threads, NAMED_BARRIERS - 1));
  }
  c->section = n;
}

static void check_named(checker *c, pm_graph *g, pm_opid op) {
  int64_t lo, hi;
  if (!pm_range(g, pm_in(g, op, 0), &lo, &hi)) return;
  /* an IF may exclude values of the range: only a constant is certain */
  if (lo < 0 && lo == hi) {
    fail(c, g, op,
         pm_printf(g->arena, "%s: barrier is %lld; 0 or more is needed",
                   pm_op_name(pm_get(g, op)->code), (long long)lo));
  }
  if (lo != hi || lo <= c->named) return;
  c->named = lo;
  c->namer = op;
}

/* Once all ordered sections are known. */
static void check_named_count(checker *c, pm_graph *g) {
  const int64_t most = NAMED_BARRIERS - 1 - g->n_threads - c->section;
  if (c->named < most) return;
  fail(c, g, c->namer,
       pm_printf(g->arena,
                 "%s: barrier is %lld; a kernel of %u threads%s has %lld named barriers for itself",
                 pm_op_name(pm_get(g, c->namer)->code), (long long)c->named, g->n_threads,
                 c->section ? ", some of which take turns," : "", (long long)most));
}

static bool is_local(const pm_graph *g, pm_opid op) {
  const pm_op *o = pm_get(g, op);
  if (op == pm_terminator(g, o->parent)) return true;
  if (!pm_is_pure(o->code) || o->n_regions) return false;
  const pm_op_info *info = &pm_ops[o->code];
  if (info->layout == PM_LAY_FIXED) return !pm_op_scratch(g, op);
  /* by shuffles of the lanes of a warp; to a scalar it is by a vote of the thread */
  if (info->layout == PM_LAY_REDUCE && pm_typeof(g, o->out)->rank) return !pm_op_scratch(g, op);
  return info->participants == PM_BY_EACH || pm_moves_in_registers(g, op);
}

static void check_local(pm_graph *g, pm_opid op, void *ctx) {
  if (is_local(g, op)) return;
  fail(ctx, g, op,
       pm_printf(g->arena,
                 "warp_where: %s is not possible where only some warps go; compute it before, or "
                 "use jnp.where",
                 pm_op_name(pm_get(g, op)->code)));
}

static const pm_type *array_of(const pm_graph *g, pm_opid op) {
  const pm_op *o = pm_get(g, op);
  for (uint32_t k = 0; k < o->n_in + o->n_out; k++) {
    const pm_type *t = pm_typeof(g, k < o->n_in ? pm_in(g, op, k) : o->out + k - o->n_in);
    if (t->kind == PM_ARRAY && t->rank) return t;
  }
  return NULL;
}

static void fail_in_warp(checker *c, pm_graph *g, pm_opid op, pm_code code, const char *why) {
  if (c->code) return;
  c->code = pm_fail(c->err, code, "%s: %s", pm_op_name(pm_get(g, op)->code), why);
  pm_err_op(c->err, g, op);
}

/* An array from outside the WARP_MAP that the op uses; 0: none. */
static pm_val captured(const pm_graph *g, pm_opid op, pm_opid warps) {
  for (uint32_t k = 0; k < pm_get(g, op)->n_in; k++) {
    const pm_value *v = pm_value_of(g, pm_in(g, op, k));
    if (v->type.kind != PM_ARRAY || !v->type.rank) continue;
    pm_opid around = g->blocks.at[v->def ? pm_get(g, v->def)->parent : v->block].parent;
    while (around && around != warps) around = g->blocks.at[pm_get(g, around)->parent].parent;
    if (!around && !(v->def && pm_has_attr(g, v->def, PM_ATTR_VALUE))) return pm_in(g, op, k);
  }
  return 0;
}

/* "float32[64, 8] ('x' of k.py:12)" */
static const char *array_text(const pm_graph *g, pm_val array) {
  const pm_value *v = pm_value_of(g, array);
  const pm_op *def = v->def ? pm_get(g, v->def) : NULL;
  const char *type = pm_type_text(g->arena, &v->type);
  const char *name = v->name ? pm_printf(g->arena, "'%s'", g->strings.at[v->name]) : "made";
  if (!def || !def->line) return type;
  return pm_printf(g->arena, "%s (%s at %s:%u)", type, name, g->strings.at[def->file], def->line);
}

static void check_in_warp(pm_graph *g, pm_opid op, void *ctx) {
  const checker *c = ctx;
  const pm_op *o = pm_get(g, op);
  const pm_type *array = array_of(g, op);
  const pm_val from_outside = captured(g, op, c->warps);
  uint32_t n = 0;
  if (from_outside) {
    fail_in_warp(ctx, g, op, PM_E_LOWERING,
                 pm_printf(g->arena,
                           "warp-level code (plgpu.warp_map, WarpMesh) closes over the array %s; "
                           "only refs and scalars can be used there: store it to SMEM before, and "
                           "load its elements there",
                           array_text(g, from_outside)));
  } else if (pm_maps_warps(o->code)) {
    fail_in_warp(ctx, g, op, PM_E_LOWERING, "warp_map and WarpMesh cannot be nested");
  } else if (pm_rule_of(g, op) == PM_LAY_LOAD && array) {
    fail_in_warp(ctx, g, op, PM_E_VALUE, "Can only load scalars in warp-level code");
  } else if (o->code == PM_OP_STORE && array) {
    fail_in_warp(ctx, g, op, PM_E_NOT_IMPLEMENTED, "Can only store scalars in warp-level code");
  } else if (!pm_ops[o->code].warp) {
    fail_in_warp(ctx, g, op, PM_E_NOT_IMPLEMENTED,
                 "Unimplemented primitive in Pallas Mosaic GPU lowering: it is not possible in "
                 "warp-level code (plgpu.warp_map, WarpMesh); do it before or after that");
  } else if (array && !pm_has_attr(g, op, PM_ATTR_VALUE)) {
    fail_in_warp(ctx, g, op, PM_E_LOWERING,
                 "Non-scalar arithmetic is not supported in warp-level lowering: arrays cannot be "
                 "used in plgpu.warp_map and WarpMesh, only refs and scalars");
  } else if (o->code == PM_OP_ARRIVE) {
    pm_attr_list(g, pm_value_of(g, pm_view_base(g, pm_in(g, op, 0)))->def, PM_ATTR_CLUSTER, &n);
    if (n) {
      fail_in_warp(ctx, g, op, PM_E_NOT_IMPLEMENTED,
                   "a warp cannot arrive on a ClusterBarrier; arrive after plgpu.warp_map");
    }
  }
}

static void check_op(pm_graph *g, pm_opid op, void *ctx) {
  checker *c = ctx;
  if (pm_maps_warps(pm_get(g, op)->code)) {
    c->warps = op;
    pm_walk(g, pm_region(g, op, 0), check_in_warp, c);
  }
  const pm_op *o = pm_get(g, op);
  if (o->code == PM_OP_ENTER_SECTION || o->code == PM_OP_LEAVE_SECTION) check_section(c, g, op);
  if (o->code == PM_OP_NAMED_SYNC || o->code == PM_OP_NAMED_ARRIVE) check_named(c, g, op);
  for (uint32_t k = 0; k < o->n_in; k++) {
    const pm_opid def = pm_value_of(g, pm_in(g, op, k))->def;
    if (!def || pm_get(g, def)->code != PM_OP_REDUCE) continue;
    if (*pm_attr(g, def, PM_ATTR_REDUCE) != PM_REDUCE_ANY_IN_WARP) continue;
    if (o->code != PM_OP_IF) {
      fail(c, g, op, "any_in_warp may only be the predicate of an if");
      return;
    }
    for (uint32_t r = 0; r < o->n_regions; r++) pm_walk(g, pm_region(g, op, r), check_local, c);
  }
}

pm_code pm_check_divergence(pm_graph *g, const pm_target *t, pm_err *err) {
  (void)t;
  checker c = {.err = err, .named = -1};
  pm_walk(g, 1, check_op, &c);
  check_named_count(&c, g);
  return c.code;
}
