/* CUDA source of the user: a separate device function with parameters a0, a1 ... and r0.
 *
 * An array is the part that this lane holds, in the order of its layout; a scalar is its value. A
 * ref in GMEM is a pointer to its first element, a ref in SMEM its 32-bit shared address, and a
 * barrier the shared address of its mbarrier. r0 points to the registers of the result, r1 ... to
 * those of the following INLINE_RESULTs, which effects keep in order. */
#include "gen.h"

typedef struct parameter {
  const char *type, *text; /* of the parameter; the argument */
  const char *doc;
} parameter;

static bool may_write(const pm_graph *g, int32_t param) {
  if (param >= (int32_t)g->n_operands) return true;
  for (uint32_t k = 0; k < g->n_outputs; k++) {
    if (g->alias && g->alias[k] == param) return true;
  }
  return false;
}

static pm_code of_ref(pm_gen *e, pm_opid op, pm_val v, parameter *p) {
  pm_view view;
  if (pm_view_of(e->g, v, true, &view, e->err)) {
    pm_err_op(e->err, e->g, op);
    return e->err->code;
  }
  p->type = "u32";
  if (view.space == PM_GMEM) {
    p->type =
        pm_str(e, "%s%s*", may_write(e->g, view.param) ? "" : "const ", pm_cpp_type(view.dtype));
  }
  p->text = pm_view_address(e, &view);
  return PM_OK;
}

static void of_barrier(pm_gen *e, pm_val v, parameter *p) {
  pm_view view;
  pm_text t;
  pm_text_init(&t, e->arena);
  p->type = "u32";
  if (pm_view_of(e->g, v, true, &view, e->err)) return;
  pm_put(&t, e->slot[view.base].text);
  for (uint32_t k = 0; k < view.n_terms; k++) {
    pm_putf(&t, " + %s", pm_term_text(e, &view.term[k], 8, false));
  }
  if (view.offset) pm_putf(&t, " + %lld", (long long)(view.offset * 8));
  p->text = t.at;
}

/* `hold`: it is A of a product, perhaps, and a loop does not change it (emit_wgmma.c). */
static void of_array(pm_gen *e, pm_val v, bool hold, parameter *p) {
  const pm_type *t = pm_typeof(e->g, v);
  const char *type = pm_cpp_type(t->dtype);
  p->type = type;
  p->text = pm_scalar_of(e, v);
  if (!t->rank) return;
  const long long n = pm_regs_of(e, v);
  p->type = pm_str(e, "const %s*", type);
  hold &= n * pm_dtypes[t->dtype].bytes % 4 == 0; /* words, as such an operand is */
  if (pm_is_array(e, v)) {
    p->text = e->slot[v].text;
    if (hold) pm_line(e, "hold_operand<%s, %lld>(%s);", type, n, p->text);
    return;
  }
  const char *name = pm_unique(e, "same");
  pm_line(e, "%s %s[%lld];", type, name, n);
  pm_unroll(e, n);
  pm_line(e, "for (int r = 0; r < %lld; r++) %s[r] = %s;", n, name, p->text);
  if (hold) pm_line(e, "hold_operand<%s, %lld>(%s);", type, n, name);
  p->text = name;
}

/* The op and the INLINE_RESULTs after it, as parameters r0 ... */
static void put_results(pm_gen *e, pm_opid op, pm_text *fn, pm_text *call) {
  const uint32_t n = pm_inline_results(e->g, op, NULL);
  pm_val *out = PM_NEW(e->arena, pm_val, n);
  pm_inline_results(e->g, op, out);
  for (uint32_t k = 0; k < n; k++) {
    const pm_type *t = pm_typeof(e->g, out[k]);
    const char *name = pm_declare(e, out[k], out[k]), *sep = call->n ? ", " : "";
    pm_putf(fn, "%s%s* r%u /* %s */", sep, pm_cpp_type(t->dtype), k, pm_type_text(e->arena, t));
    pm_putf(call, "%s%s%s", sep, pm_is_array(e, out[k]) ? "" : "&", name);
  }
}

/* Its INLINE has made it. */
pm_code pm_cuda_INLINE_RESULT(pm_gen *e, pm_opid op) {
  if (e->slot[pm_get(e->g, op)->out].text) return PM_OK;
  return pm_gen_fail(e, op, PM_E_INTERNAL, "there is no inline_cuda in front of it");
}

pm_code pm_cuda_INLINE(pm_gen *e, pm_opid op) {
  const pm_op *o = pm_get(e->g, op);
  const char *source = e->g->strings.at[*pm_attr(e->g, op, PM_ATTR_FORMAT)];
  const char *name = pm_unique(e, "inline"), *sep = "";
  const bool multiplies = strstr(source, "wgmma");
  pm_text fn, call;
  pm_text_init(&fn, e->arena);
  pm_text_init(&call, e->arena);
  pm_note(e, op, "inline_cuda");
  pm_putf(&fn, "// of the user: %s:%u\nFN void %s(", e->g->strings.at[o->file], o->line, name);
  for (uint32_t k = 0; k < o->n_in; k++, sep = ", ") {
    const pm_val v = pm_in(e->g, op, k);
    const uint8_t kind = pm_typeof(e->g, v)->kind;
    parameter p = {0};
    if (kind == PM_REF) {
      PM_TRY(of_ref(e, op, v, &p));
    } else if (kind == PM_BARRIER) {
      of_barrier(e, v, &p);
    } else {
      of_array(e, v, multiplies && pm_repeats(e->g, v, op), &p);
    }
    pm_putf(&fn, "%s%s a%u /* %s */", sep, p.type, k, pm_type_text(e->arena, pm_typeof(e->g, v)));
    pm_putf(&call, "%s%s", sep, p.text);
  }
  put_results(e, op, &fn, &call);
  pm_putf(&fn, ") {\n%s\n}\n", source);
  pm_put(&e->inlines, fn.at);
  pm_put(&e->inlines, "\n");
  pm_line(e, "%s(%s);", name, call.at);
  return PM_OK;
}
