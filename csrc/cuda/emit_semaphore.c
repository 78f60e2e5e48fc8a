/* Semaphores and sleeping.
 *
 * Semaphores of a block are words of shared memory after the mbarriers, initialised to zero when
 * the kernel starts (program.c). Those of the launch are words of its counters, after those of
 * NEXT_TILE. One lane signals or waits for the thread, or for the warp in a WARP_MAP. A launch that
 * may start before the previous one ends must wait for that before it uses them, because both use
 * the same counters. */
#include "gen.h"

pm_code pm_cuda_ALLOC_SEMAPHORE(pm_gen *e, pm_opid op) { return pm_cuda_ALLOC_BARRIER(e, op); }

pm_code pm_cuda_GLOBAL_SEMAPHORE(pm_gen *e, pm_opid op) {
  const long long first = *pm_attr(e->g, op, PM_ATTR_N) + e->first_semaphore;
  const char *at = first ? pm_str(e, "counters + %lld", first) : "counters";
  pm_bind(e, pm_get(e->g, op)->out, at, PM_FORM_SCALAR);
  return PM_OK;
}

typedef struct semaphore {
  const char *address, *prefix, *scope; /* of the names of its functions; template argument */
  const char *first;                    /* address of the first one of its ref */
} semaphore;

static pm_code semaphore_of(pm_gen *e, pm_opid op, semaphore *s) {
  pm_view v;
  pm_text t;
  if (pm_view_of(e->g, pm_in(e->g, op, 0), true, &v, e->err)) {
    pm_err_op(e->err, e->g, op);
    return e->err->code;
  }
  const bool global = v.space == PM_GMEM;
  const int scale = global ? 1 : 4;
  pm_text_init(&t, e->arena);
  if (v.param >= 0) {
    s->address = pm_str(e, "(u32*)(%s)", pm_view_address(e, &v));
    s->first = pm_str(e, "(u32*)%s", e->slot[v.base].text);
    s->prefix = "";
    s->scope = *pm_attr(e->g, op, PM_ATTR_SYSTEM) ? "<true>" : "<false>";
    return PM_OK;
  }
  if (pm_is_remote(&v)) {
    const int64_t first = *pm_attr(e->g, v.alloc, PM_ATTR_N) + e->first_semaphore;
    pm_put(&t, pm_remote_base(e, &v, -1, "u32", first));
  } else {
    pm_put(&t, e->slot[v.base].text);
  }
  s->first = global ? e->slot[v.base].text : NULL;
  for (uint32_t k = 0; k < v.n_terms; k++) {
    pm_putf(&t, " + %s", pm_term_text(e, &v.term[k], scale, false));
  }
  if (v.offset) pm_putf(&t, " + %lld", (long long)(v.offset * scale));
  s->address = t.at;
  s->prefix = global ? "" : "block_";
  s->scope = !global ? "" : *pm_attr(e->g, op, PM_ATTR_SYSTEM) ? "<true>" : "<false>";
  if (global && e->program->pdl) pm_line(e, "griddepcontrol_wait();");
  return PM_OK;
}

static const char *by_one(pm_gen *e) { return e->lane ? "" : pm_str(e, "%s ", pm_elected(e)); }

/* Of a signal that is not a plain one. */
static const char *signal_name(pm_gen *e, pm_opid op) {
  static const char *const names[PM_RELEASE_COUNT] = {
      [PM_RELEASE_FIRST] = "semaphore_signal_first",
      [PM_RELEASE_SHARED] = "semaphore_signal_relaxed",
  };
  const pm_opid view = pm_view_device(e->g, pm_in(e->g, op, 0));
  if (view && pm_get(e->g, view)->code == PM_OP_MULTICAST_REF) return "semaphore_signal_all";
  return names[*pm_attr(e->g, op, PM_ATTR_RELEASE)];
}

pm_code pm_cuda_SIGNAL(pm_gen *e, pm_opid op) {
  semaphore s;
  pm_note(e, op, "semaphore_signal");
  PM_TRY(semaphore_of(e, op, &s));
  const char *n = pm_scalar_of(e, pm_in(e->g, op, 1)), *name = signal_name(e, op);
  if (name) pm_line(e, "%s%s(%s, %s);", by_one(e), name, s.address, n);
  else pm_line(e, "%s%ssemaphore_signal%s(%s, %s);", by_one(e), s.prefix, s.scope, s.address, n);
  return PM_OK;
}

pm_code pm_cuda_AWAIT(pm_gen *e, pm_opid op) {
  const char *how = *pm_attr(e->g, op, PM_ATTR_DECREMENT) ? "take" : "wait";
  semaphore s;
  pm_note(e, op, "semaphore_wait");
  PM_TRY(semaphore_of(e, op, &s));
  const char *n = pm_scalar_of(e, pm_in(e->g, op, 1));
  const bool mesh = s.first && pm_n_devices(e->g) > 1;
  if (mesh) s.scope = "<true>"; /* another device may have signalled */
  if (mesh && !e->options->check_waits) {
    pm_print_watched_wait(e, op, how, s.address, n, s.first);
  } else {
    pm_print_wait_of_one(e, op, pm_str(e, "%ssemaphore_%s", s.prefix, how), s.scope,
                         pm_str(e, "%s, %s", s.address, n));
  }
  if (e->program->multicasts) pm_line(e, "fence_proxy_alias();");
  return PM_OK;
}

/* One lane reads; the others get the number from scratch. */
pm_code pm_cuda_READ_SEMAPHORE(pm_gen *e, pm_opid op) {
  const pm_val out = pm_get(e->g, op)->out;
  semaphore s;
  pm_note(e, op, "semaphore_read");
  PM_TRY(semaphore_of(e, op, &s));
  const char *x = pm_declare(e, out, out);
  if (!e->lane) pm_begin(e, PM_ONE_LANE " {");
  pm_line(e, "%s = %ssemaphore_read%s(%s);", x, s.prefix, s.scope, s.address);
  if (e->lane) return PM_OK;
  pm_end_of_one_lane(e, x);
  return PM_OK;
}

pm_code pm_cuda_DELAY(pm_gen *e, pm_opid op) {
  pm_note(e, op, "delay");
  pm_line(e, "delay(%s);", pm_scalar_of(e, pm_in(e->g, op, 0)));
  return PM_OK;
}
