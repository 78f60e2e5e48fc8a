/* Loops, branches, scopes.
 *
 * What a region carries or returns is a C++ variable declared in front of it; region arguments and
 * results of the op share its slot. A YIELD assigns; where it permutes carries, those read after
 * they were written are saved first. */
#include "gen.h"

static pm_code check_carries(pm_gen *e, pm_opid op) {
  const pm_op *o = pm_get(e->g, op);
  for (uint32_t k = 0; k < o->n_out; k++) {
    if (pm_typeof(e->g, o->out + k)->kind != PM_ARRAY) {
      return pm_gen_fail(e, op, PM_E_NOT_IMPLEMENTED,
                         "refs and barriers cannot be carried or returned; use them from outside");
    }
  }
  return PM_OK;
}

/* The name that the user gave: to the result, else to the region's argument. */
static pm_val named(pm_gen *e, pm_val result, pm_val arg) {
  return pm_value_of(e->g, result)->name || !arg ? result : arg;
}

static const char *copy_of(pm_gen *e, pm_val v) {
  const char *name = pm_unique(e, "old");
  const char *type = pm_cpp_type(pm_typeof(e->g, v)->dtype);
  if (!pm_is_array(e, v)) {
    pm_line(e, "const %s %s = %s;", type, name, pm_at(e, v, "0"));
    return name;
  }
  const int64_t n = pm_regs_of(e, v);
  pm_line(e, "%s %s[%lld];", type, name, (long long)n);
  if (n > 1) pm_line(e, "#pragma unroll");
  pm_line(e, "for (int r = 0; r < %lld; r++) %s[r] = %s;", (long long)n, name, pm_at(e, v, "r"));
  return name;
}

/* Assign the yielded values of a region to the variables first, first + 1 ... */
static void emit_yield(pm_gen *e, pm_blk block, uint32_t skip, pm_val first) {
  const pm_opid y = pm_terminator(e->g, block);
  const uint32_t n = pm_get(e->g, y)->n_in - skip;
  if (n) pm_note(e, y, "");
  pm_slot *from = PM_NEW(e->arena, pm_slot, n + 1);
  for (uint32_t k = 0; k < n; k++) {
    const pm_val v = pm_in(e->g, y, skip + k);
    pm_at(e, v, "0");
    from[k] = e->slot[v];
    for (uint32_t j = 0; j < k; j++) { /* a variable that is written before it is read here */
      if (e->slot[first + j].text == from[k].text && from[j].text != from[k].text) {
        from[k].text = copy_of(e, v);
        break;
      }
    }
  }
  for (uint32_t k = 0; k < n; k++) {
    const pm_val v = pm_in(e->g, y, skip + k);
    if (from[k].text == e->slot[first + k].text) continue;
    const pm_slot keep = e->slot[v];
    e->slot[v] = from[k];
    pm_assign(e, first + k, v);
    e->slot[v] = keep;
  }
}

static void declare_carries(pm_gen *e, pm_opid op, uint32_t skip, pm_val args) {
  const pm_op *o = pm_get(e->g, op);
  for (uint32_t k = 0; k < o->n_out; k++) {
    const pm_val init = pm_in(e->g, op, skip + k);
    pm_at(e, init, "0");
    pm_declare(e, o->out + k, named(e, o->out + k, args ? args + k : 0));
    pm_assign(e, o->out + k, init);
  }
}

static void share_carries(pm_gen *e, pm_opid op, pm_val args) {
  const pm_op *o = pm_get(e->g, op);
  for (uint32_t k = 0; k < o->n_out; k++) pm_alias(e, args + k, o->out + k);
}

pm_code pm_cuda_FOR(pm_gen *e, pm_opid op) {
  const pm_op *o = pm_get(e->g, op);
  const pm_blk body = pm_region(e->g, op, 0);
  const pm_val index = e->g->blocks.at[body].arg;
  const int64_t unroll = *pm_attr(e->g, op, PM_ATTR_UNROLL);
  PM_TRY(check_carries(e, op));
  pm_note(e, op, "for");
  declare_carries(e, op, 2, index + 1);
  share_carries(e, op, index + 1);
  const char *i = pm_name_of(e, index);
  const char *lower = pm_scalar_of(e, pm_in(e->g, op, 0));
  const char *upper = pm_scalar_of(e, pm_in(e->g, op, 1));
  pm_bind(e, index, i, PM_FORM_SCALAR);
  if (unroll) {
    pm_line(e, "#pragma unroll %lld", (long long)unroll);
  } else {
    pm_line(e, "#pragma unroll");
  }
  pm_begin(e, "for (i32 %s = %s; %s < %s; %s++) {", i, lower, i, upper, i);
  PM_TRY(pm_gen_block(e, body));
  emit_yield(e, body, 0, o->out);
  pm_end(e);
  return PM_OK;
}

pm_code pm_cuda_WHILE(pm_gen *e, pm_opid op) {
  const pm_blk cond = pm_region(e->g, op, 0), body = pm_region(e->g, op, 1);
  const pm_val cond_args = e->g->blocks.at[cond].arg, body_args = e->g->blocks.at[body].arg;
  PM_TRY(check_carries(e, op));
  pm_note(e, op, "while");
  declare_carries(e, op, 0, body_args);
  share_carries(e, op, cond_args);
  share_carries(e, op, body_args);
  pm_line(e, "#pragma unroll 1");
  pm_begin(e, "for (;;) {");
  PM_TRY(pm_gen_block(e, cond));
  pm_line(e, "if (!(%s)) break;", pm_scalar_of(e, pm_in(e->g, pm_terminator(e->g, cond), 0)));
  PM_TRY(pm_gen_block(e, body));
  emit_yield(e, body, 0, pm_get(e->g, op)->out);
  pm_end(e);
  return PM_OK;
}

static void declare_results(pm_gen *e, pm_opid op) {
  const pm_op *o = pm_get(e->g, op);
  for (uint32_t k = 0; k < o->n_out; k++) pm_declare(e, o->out + k, o->out + k);
}

static pm_code emit_branch(pm_gen *e, pm_opid op, uint32_t region) {
  const pm_blk b = pm_region(e->g, op, region);
  const int64_t registers = e->registers;
  PM_TRY(pm_gen_block(e, b));
  emit_yield(e, b, 0, pm_get(e->g, op)->out);
  e->registers = registers;
  return PM_OK;
}

pm_code pm_cuda_IF(pm_gen *e, pm_opid op) {
  PM_TRY(check_carries(e, op));
  const pm_blk other = pm_region(e->g, op, 1);
  pm_note(e, op, "if");
  declare_results(e, op);
  pm_begin(e, "if (%s) {", pm_scalar_of(e, pm_in(e->g, op, 0)));
  PM_TRY(emit_branch(e, op, 0));
  if (e->g->blocks.at[other].ops.n > 1 || pm_get(e->g, op)->n_out) {
    e->indent--;
    pm_begin(e, "} else {");
    PM_TRY(emit_branch(e, op, 1));
  }
  pm_end(e);
  return PM_OK;
}

pm_code pm_cuda_SWITCH(pm_gen *e, pm_opid op) {
  const uint32_t n = pm_get(e->g, op)->n_regions;
  PM_TRY(check_carries(e, op));
  pm_note(e, op, "switch");
  declare_results(e, op);
  pm_begin(e, "switch (max_int(0, min_int(%u, %s))) {", n - 1, pm_scalar_of(e, pm_in(e->g, op, 0)));
  for (uint32_t k = 0; k < n; k++) {
    if (k + 1 < n) {
      pm_begin(e, "case %u: {", k);
    } else {
      pm_begin(e, "default: {");
    }
    PM_TRY(emit_branch(e, op, k));
    pm_line(e, "break;");
    pm_end(e);
  }
  pm_end(e);
  return PM_OK;
}

pm_code pm_cuda_SCOPE(pm_gen *e, pm_opid op) {
  PM_TRY(check_carries(e, op));
  pm_note(e, op, "scope");
  declare_results(e, op);
  pm_begin(e, "{");
  if (*pm_attr(e->g, op, PM_ATTR_COLLECTIVE) && e->g->n_threads > 1) pm_line(e, "block_sync();");
  PM_TRY(emit_branch(e, op, 0));
  pm_end(e);
  return PM_OK;
}

/* The op that owns the region prints it. */
pm_code pm_cuda_YIELD(pm_gen *e, pm_opid op) { return (void)e, (void)op, PM_OK; }
