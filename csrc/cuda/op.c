/* One op: a number for all elements becomes a variable, or text that stands where it is used; all
 * others have an emitter (emitters.c). */
#include "gen.h"

/* Does the op compute an array, rather than one number for all elements? */
bool pm_makes_array(pm_gen *e, pm_opid op, const bool *in_run) {
  const pm_op *o = pm_get(e->g, op);
  if (!pm_wants_array(e, o->out)) return false;
  if (o->code == PM_OP_IOTA) return true;
  for (uint32_t k = 0; k < o->n_in; k++) {
    const pm_val v = pm_in(e->g, op, k);
    if (pm_is_array(e, v) || e->slot[v].form == PM_FORM_WORDS || (in_run && in_run[v])) return true;
  }
  return false;
}

bool pm_is_scalar_op(pm_gen *e, pm_opid op) {
  return pm_is_view(e->g, op) || (pm_is_elementwise(e->g, op) && !pm_makes_array(e, op, NULL));
}

bool pm_is_barrier(const pm_op *o) { return o->code == PM_OP_OPT_BARRIER; }

/* Does an op print the text of an operand once? */
static bool prints_once(const pm_op *user) {
  if (user->code == PM_OP_IF || user->code == PM_OP_WAIT) return true;
  if (user->code == PM_OP_YIELD) return user->n_in == 1;
  return pm_ops[user->code].layout == PM_LAY_POINTWISE && !pm_is_barrier(user);
}

/* Is the C++ expression of an op on such operands of its own dtype? */
static bool keeps_type(pm_dtype d) { return d == PM_I32 || d == PM_BOOL || d == PM_F32; }

/* Does the text of a scalar without a name stand where its one use is? C++ gives it the op's dtype
 * without a variable; what the use computes is printed once, and not for each register. */
static bool is_inlined(pm_gen *e, pm_opid op) {
  enum { LONGEST = 40 };
  const pm_op *o = pm_get(e->g, op);
  const pm_value *v = pm_value_of(e->g, o->out);
  if (v->name || e->uses[o->out] != 1 || strlen(e->expr) > LONGEST) return false;
  const int rule = pm_ops[o->code].layout;
  const bool moves = rule == PM_LAY_BROADCAST;
  if (rule != PM_LAY_POINTWISE && !moves && o->code != PM_OP_AXIS) return false;
  if (pm_is_barrier(o)) return false;
  const pm_op *user = pm_get(e->g, e->user[o->out]);
  if (user->parent != o->parent || !prints_once(user)) return false;
  if (pm_ops[user->code].layout == PM_LAY_POINTWISE && pm_wants_array(e, user->out)) return false;
  if (user->code == PM_OP_IF || moves) return true;
  for (uint32_t k = 0; k < o->n_in; k++) {
    if (!keeps_type(pm_typeof(e->g, pm_in(e->g, op, k))->dtype)) return false;
  }
  return keeps_type(v->type.dtype);
}

pm_code pm_gen_scalar(pm_gen *e, pm_opid op) {
  const pm_op *o = pm_get(e->g, op);
  if (pm_has_attr(e->g, op, PM_ATTR_VALUE) || pm_is_view(e->g, op))
    return PM_OK; /* where it is used */
  if (pm_only_moves(o->code) || o->code == PM_OP_MULTIPLE_OF) {
    pm_alias(e, o->out, pm_in(e->g, op, 0));
    return PM_OK;
  }
  PM_TRY(pm_emit_op(e, op));
  if (is_inlined(e, op)) {
    pm_bind(e, o->out, pm_atom(e, e->expr), PM_FORM_SCALAR);
    return PM_OK;
  }
  const char *name = pm_name_of(e, o->out);
  pm_place(e, op);
  pm_line(e, "const %s %s = %s;", pm_cpp_type(pm_typeof(e->g, o->out)->dtype), name, e->expr);
  pm_bind(e, o->out, name, PM_FORM_SCALAR);
  return PM_OK;
}

pm_code pm_gen_op(pm_gen *e, pm_opid op) {
  pm_check_indices(e, op);
  return pm_is_scalar_op(e, op) ? pm_gen_scalar(e, op) : pm_emit_op(e, op);
}
