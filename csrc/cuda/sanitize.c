/* What a program checks by itself, with PALLAS_MGPU_SANITIZE or on the emulated machine.
 *
 * Before an access, the dynamic starts of its view, the coordinates of blocks and the numbers of
 * devices are compared with their limits; a wait gives up after some seconds. The first failure is
 * noted in a record in global memory, with the number of its site; then the lanes go to the end of
 * the kernel, and others that wait for them follow when they see the record. Nothing traps, which
 * would cost the products their overlap and the process its CUDA context.
 *
 * A warpgroup leaves as a whole: one lane, or one warp, goes to the end of the region that it runs
 * alone, where the others learn of it by a vote. All leave to one label, after which the kernel
 * ends as usual: blocks of a cluster meet, tensor memory is freed, counters become zero. The
 * hardware's named barriers have no wait that gives up, so in their place, where warpgroups meet,
 * each warp adds one to a counter in shared memory and waits until it has the round's arrivals. A
 * block that begins after the failure leaves at once. setmaxnreg still waits for registers without
 * an end.
 *
 * Where lanes have indices of their own, in an array, those that are outside are noted, and their
 * elements left out; so are elements of a slice under a mask that is an array. What lies outside of
 * an argument is clipped by copies, so their side in global memory is not checked; nor is, under
 * such a mask, a slice of which the accessed view is a part.
 *
 * Without the checks, waits for other devices of a mesh are watched: the host ends them where
 * another device will not signal any more. A wait that was ended returns as if the semaphore had
 * come, so that no lane waits for others that have left, and the kernel runs to its end; what it
 * computes is not used. That costs nothing until a wait has looked at its semaphore many times. */
#include <inttypes.h>
#include <stdio.h>

#include "gen.h"

static uint32_t add_site(pm_gen *e, pm_opid op, pm_program_site s) {
  const pm_op *o = pm_get(e->g, op);
  s.op = pm_op_name(o->code);
  s.file = o->line ? e->g->strings.at[o->file] : NULL;
  s.line = o->line;
  e->checks = true;
  pm_vec_push(e->arena, &e->sites, s);
  return e->sites.n - 1;
}

static const char *ref_name(pm_gen *e, pm_val view) {
  const uint32_t name = pm_value_of(e->g, pm_view_base(e->g, view))->name;
  if (name) return e->g->strings.at[name];
  return pm_typeof(e->g, view)->kind == PM_SEMAPHORE ? "semaphore" : "a ref";
}

/* ---- the way out --------------------------------------------------------------------------- */

static const char *leave(pm_gen *e) {
  const char **label = e->lane ? &e->lane_exit : e->warps ? &e->warp_exit : NULL;
  e->leaves = true;
  if (!label) return "goto leave;";
  if (!*label) *label = pm_unique(e, e->lane ? "lane_exit" : "warp_exit");
  if (!e->left) pm_put(&e->registers_of_ptx, "  bool left = false;\n");
  e->left = true;
  return pm_str(e, "{ left = true; goto %s; }", *label);
}

/* All lanes that go on together stop together. */
static void stop_if(pm_gen *e, const char *condition) {
  const char *any = e->lane ? "%s" : e->warps ? "warp_any(%s)" : "lanes_any(wg, %s)";
  char text[32];
  snprintf(text, sizeof text, "if (%s) %%s", any);
  pm_line(e, text, condition, leave(e));
}

void pm_print_exit(pm_gen *e, const char **label) {
  if (!*label) return;
  pm_line(e, "%s:;", *label);
  *label = NULL;
  stop_if(e, "left");
}

void pm_print_leave(pm_gen *e, uint32_t begin) {
  if (!e->leaves) return;
  const char *body = pm_str(e, "%s", e->out.at + begin);
  e->out.n = begin;
  if (e->options->check_waits)
    pm_line(e, "if (lanes_any(wg, sanitizer_stopped(sanitizer))) goto leave;");
  pm_line(e, "{");
  pm_put(&e->out, body);
  pm_line(e, "}");
  pm_line(e, "leave:");
  pm_line(e, "sanitizer_settle(sanitizer);");
}

/* ---- indices ------------------------------------------------------------------------------- */

/* The last argument of index_outside, of a view of another device's memory. */
static const char *place_of(pm_gen *e, pm_val view) {
  const pm_opid op = pm_view_device(e->g, view);
  if (!op || pm_get(e->g, op)->n_in < 2) return ""; /* of all devices */
  return pm_str(e, ", 1 + (%s)", pm_scalar_of(e, pm_in(e->g, op, 1)));
}

/* Is a ref more than an argument, on this device or another one? */
static bool is_part(const pm_graph *g, pm_val ref) {
  const pm_val base = pm_view_base(g, ref);
  const pm_opid def = pm_value_of(g, ref)->def;
  if (ref == base) return false;
  return !def || def != pm_view_device(g, ref) || pm_in(g, def, 0) != base;
}

/* extent: the size of the call that the limit is above its least by, 0: there is none */
static void check_index(pm_gen *e, pm_opid op, pm_val index, int64_t limit, uint32_t extent,
                        const char *mask, const char *place, pm_program_site s) {
  const pm_size *open = extent ? &e->g->sizes.at[extent] : NULL;
  const char *most = pm_str(e, "%lld", (long long)limit);
  int64_t lo, hi;
  pm_scalar constant;
  if (pm_range(e->g, index, &lo, &hi) && lo >= 0 && hi <= limit) return;
  if (pm_constant(e->g, index, &constant) && constant.i >= 0 && constant.i <= limit) return;
  if (open)
    most = pm_str(e, "%s - %lld", pm_size_text(e, extent), (long long)(open->least - limit));
  pm_place(e, op);
  pm_line(e, "if (%s%sindex_outside(%s, %s, %uu, sanitizer%s)) %s", mask, *mask ? " && " : "",
          pm_scalar_of(e, index), most, add_site(e, op, s), place, leave(e));
}

/* Of a ref; an extent that a call tells goes by the name of its size. */
static const char *shape_text(pm_gen *e, pm_val ref) {
  const pm_graph *g = e->g;
  const pm_type *t = pm_typeof(g, ref);
  pm_text out;
  pm_text_init(&out, e->arena);
  pm_put(&out, "(");
  for (uint32_t d = 0; d < t->rank; d++) {
    const uint32_t extent = pm_whole_extent(g, ref, d);
    const char *name = extent ? g->strings.at[g->sizes.at[extent].name] : "";
    if (d) pm_put(&out, ", ");
    if (!extent) pm_putf(&out, "%" PRId64, t->dim[d]);
    else pm_put(&out, *name ? name : "?");
  }
  pm_put(&out, t->rank == 1 ? ",)" : ")");
  return out.at;
}

static void check_starts(pm_gen *e, pm_opid op, pm_opid view_op, pm_val view, const char *mask) {
  const pm_graph *g = e->g;
  const pm_val of = pm_in(g, view_op, 0);
  const pm_type *t = pm_typeof(g, of);
  uint32_t n, n_strides, next = 1;
  const int64_t *starts = pm_attr_list(g, view_op, PM_ATTR_STARTS, &n);
  const int64_t *sizes = pm_attr_list(g, view_op, PM_ATTR_SIZES, &n);
  const int64_t *strides = pm_attr_list(g, view_op, PM_ATTR_STRIDES, &n_strides);
  for (uint32_t d = 0; d < n; d++) {
    if (starts[d] != PM_DYNAMIC) continue;
    const bool dropped = sizes[d] < 1;
    const int64_t span = dropped ? 1 : (sizes[d] - 1) * (n_strides ? strides[d] : 1) + 1;
    const pm_program_site s = {.ref = ref_name(e, view),
                               .shape = shape_text(e, of),
                               .dim = d,
                               .size = dropped ? 0 : span,
                               .of_view = is_part(g, of)};
    const uint32_t extent = pm_whole_extent(g, of, d);
    const int64_t size = extent ? g->sizes.at[extent].least : t->dim[d];
    check_index(e, op, pm_in(g, view_op, next++), size - span, extent, mask, place_of(e, view), s);
  }
}

/* clipped: what lies outside of the argument does not count. */
static void check_view(pm_gen *e, pm_opid op, pm_val view, const char *mask, bool clipped) {
  const pm_graph *g = e->g;
  for (pm_val v = view; pm_value_of(g, v)->def;) {
    const pm_opid def = pm_value_of(g, v)->def;
    if (!pm_makes_view(pm_get(g, def)->code)) return;
    if (!clipped && pm_has_attr(g, def, PM_ATTR_STARTS)) check_starts(e, op, def, view, mask);
    if (pm_get(g, def)->code == PM_OP_CLUSTER_REF) {
      const uint32_t axis = (uint32_t)*pm_attr(g, def, PM_ATTR_DIM);
      const pm_program_site s = {
          .ref = ref_name(e, view), .shape = "", .dim = axis, .blocks = (uint32_t)g->cluster[axis]};
      check_index(e, op, pm_in(g, def, 1), g->cluster[axis] - 1, 0, mask, "", s);
    }
    if (pm_get(g, def)->code == PM_OP_DEVICE_REF) {
      const uint32_t n = (uint32_t)pm_n_devices(g);
      const pm_program_site s = {.ref = ref_name(e, view), .shape = "", .devices = n};
      check_index(e, op, pm_in(g, def, 1), (int64_t)n - 1, 0, mask, "", s);
    }
    v = pm_in(g, def, 0);
  }
}

/* Text of the condition under which the op accesses memory, "" always; NULL: an array. */
static const char *mask_of(pm_gen *e, pm_opid op) {
  const pm_op *o = pm_get(e->g, op);
  if (pm_has_attr(e->g, op, PM_ATTR_PREDICATED) && *pm_attr(e->g, op, PM_ATTR_PREDICATED))
    return pm_scalar_of(e, pm_in(e->g, op, o->n_in - 1));
  if (!pm_is_masked(o->code)) return "";
  pm_access a = pm_accesses(op);
  pm_next_access(e->g, &a);
  const pm_val mask = pm_in(e->g, op, a.writes ? 2 : 1); /* after the value that is written */
  return pm_is_array(e, mask) ? NULL : pm_at(e, mask, "0");
}

void pm_check_indices(pm_gen *e, pm_opid op) {
  const pm_graph *g = e->g;
  const char *mask = e->options->check_indices ? mask_of(e, op) : NULL;
  if (!mask) return;
  const bool copies = pm_has_attr(g, op, PM_ATTR_ENGINE) || pm_has_attr(g, op, PM_ATTR_OOB);
  const bool promised =
      pm_has_attr(g, op, PM_ATTR_OOB) && *pm_attr(g, op, PM_ATTR_OOB) == PM_OOB_PROMISE_IN_BOUNDS;
  pm_access a = pm_accesses(op);
  while (pm_next_access(g, &a)) {
    if (!a.view || a.where == PM_IN_PHASE) continue;
    check_view(e, op, a.view, mask, a.where == PM_IN_GMEM && copies && !promised);
  }
}

/* Under a mask that is an array, the elements of a slice are inside one by one. */
static void put_starts(pm_gen *e, pm_opid op, const char *const *at, pm_text *t) {
  const pm_graph *g = e->g;
  const pm_val view = pm_in(g, op, 0);
  const pm_opid def = pm_value_of(g, view)->def;
  if (!at || !def || !pm_has_attr(g, def, PM_ATTR_STARTS) || mask_of(e, op)) return;
  const pm_val of = pm_in(g, def, 0);
  uint32_t n, n_dims = 0, n_strides, next = 1, kept = 0;
  const int64_t *starts = pm_attr_list(g, def, PM_ATTR_STARTS, &n);
  const int64_t *sizes = pm_attr_list(g, def, PM_ATTR_SIZES, &n);
  const int64_t *strides = pm_attr_list(g, def, PM_ATTR_STRIDES, &n_strides);
  const int64_t *dims = pm_attr_list(g, op, PM_ATTR_DIMS, &n_dims);
  for (uint32_t d = 0; d < n; d++) {
    const bool dropped = sizes[d] < 1;
    const uint32_t j = kept;
    kept += !dropped;
    if (starts[d] != PM_DYNAMIC) continue;
    const pm_val start = pm_in(g, def, next++);
    const int64_t along = dropped ? -1 : j < n_dims ? dims[j] : (int64_t)j;
    if (!dropped && (along < 0 || !at[along])) continue; /* an array indexes it */
    const int64_t stride = n_strides ? strides[d] : 1, span = dropped ? 0 : (sizes[d] - 1) * stride;
    const uint32_t extent = pm_whole_extent(g, of, d);
    const int64_t least = extent ? g->sizes.at[extent].least : pm_typeof(g, of)->dim[d];
    int64_t lo, hi;
    if (pm_range(g, start, &lo, &hi) && lo >= 0 && hi + span < least) continue;
    const char *x = pm_scalar_of(e, start);
    if (!dropped) x = pm_str(e, "%s + (%s) * %lld", x, at[along], (long long)stride);
    const char *most = extent ? pm_str(e, "%s - 1", pm_size_text(e, extent))
                              : pm_str(e, "%lld", (long long)least - 1);
    const pm_program_site s = {
        .ref = ref_name(e, view), .shape = shape_text(e, of), .dim = d, .of_view = is_part(g, of)};
    pm_putf(t, "%s!index_outside(%s, %s, %uu, sanitizer%s)", t->n ? " && " : "", x, most,
            add_site(e, op, s), place_of(e, view));
  }
}

const char *pm_inside(pm_gen *e, pm_opid op, const char *const *at, const char *condition,
                      const char *reg) {
  const pm_graph *g = e->g;
  uint32_t n = 0;
  pm_text t;
  if (!e->options->check_indices || !pm_is_masked(pm_get(g, op)->code)) return condition;
  const int64_t *dims = pm_attr_list(g, op, PM_ATTR_DIMS, &n);
  const pm_val view = pm_in(g, op, 0);
  const pm_type *type = pm_typeof(g, view);
  pm_text_init(&t, e->arena);
  pm_put(&t, strcmp(condition, "true") ? condition : "");
  put_starts(e, op, at, &t);
  for (uint32_t d = 0; d < n; d++) {
    int64_t lo, hi;
    if (dims[d] >= 0) continue;
    const pm_val index = pm_in(g, op, pm_n_beside(pm_atomic_of(g, op)) + (uint32_t)(-1 - dims[d]));
    const uint32_t extent = pm_whole_extent(g, view, d);
    const int64_t least = extent ? g->sizes.at[extent].least : type->dim[d];
    const char *most = extent ? pm_str(e, "%s - 1", pm_size_text(e, extent))
                              : pm_str(e, "%lld", (long long)type->dim[d] - 1);
    if (pm_range(g, index, &lo, &hi) && lo >= 0 && hi < least) continue;
    const pm_program_site s = {.ref = ref_name(e, view),
                               .shape = shape_text(e, view),
                               .dim = d,
                               .of_view = is_part(g, view)};
    pm_putf(&t, "%s!index_outside(%s, %s, %uu, sanitizer%s)", t.n ? " && " : "",
            pm_at(e, index, reg), most, add_site(e, op, s), place_of(e, view));
  }
  return t.n ? t.at : condition;
}

/* ---- waits --------------------------------------------------------------------------------- */

void pm_print_wait(pm_gen *e, pm_opid op, const char *function, const char *arguments) {
  const pm_program_site s = {.waits = true, .ref = ref_name(e, pm_in(e->g, op, 0))};
  if (!e->options->check_waits) {
    pm_line(e, "%s(%s);", function, arguments);
    return;
  }
  stop_if(e, pm_str(e, "%s_timed(%s, %uu, sanitizer)", function, arguments, add_site(e, op, s)));
}

void pm_print_wait_of_one(pm_gen *e, pm_opid op, const char *function, const char *scope,
                          const char *arguments) {
  const pm_program_site s = {.waits = true, .ref = ref_name(e, pm_in(e->g, op, 0))};
  if (!e->options->check_waits) {
    pm_line(e, "%s%s%s(%s);", e->lane ? "" : pm_str(e, "%s ", pm_elected(e)), function, scope,
            arguments);
    if (!e->lane) pm_line(e, "%s", pm_meet(e));
    return;
  }
  const char *call =
      pm_str(e, "%s_timed%s(%s, %uu, sanitizer)", function, scope, arguments, add_site(e, op, s));
  if (e->lane) {
    stop_if(e, call);
    return;
  }
  const char *late = pm_unique(e, "late");
  pm_line(e, "bool %s = false;", late);
  pm_line(e, "%s %s = %s;", pm_elected(e), late, call);
  stop_if(e, late);
}

void pm_print_watched_wait(pm_gen *e, pm_opid op, const char *how, const char *address,
                           const char *n, const char *first) {
  const uint32_t name = pm_value_of(e->g, pm_view_base(e->g, pm_in(e->g, op, 0)))->name;
  const char *ref = name ? pm_str(e, "'%s'", e->g->strings.at[name]) : "the semaphores";
  const pm_program_site s = {.waits = true, .ref = ref};
  const bool checks = e->checks; /* those are others */
  const uint32_t site = add_site(e, op, s);
  e->checks = checks;
  e->watches = true;
  pm_line(e, "%s%ssemaphore_%s_watched<true>(%s, %s, %s, %uu, watch);",
          e->lane ? "" : pm_elected(e), e->lane ? "" : " ", how, address, n, first, site);
  if (!e->lane) pm_line(e, "%s", pm_meet(e));
}

void pm_print_arrival(pm_gen *e, const char *who, const char *function, const char *id,
                      const char *lanes) {
  if (e->arrivals)
    pm_line(e, "%sbarrier_arrive_counted(smem + %u, %s, %s);", who, e->arrivals, id,
            *lanes ? lanes : "256");
  else pm_line(e, "%s%s(%s%s%s);", who, function, id, *lanes ? ", " : "", lanes);
}

void pm_print_meeting(pm_gen *e, pm_opid op, const char *who, const char *function, const char *id,
                      const char *lanes) {
  const pm_program_site s = {.waits = true, .ref = ""};
  if (!e->arrivals) {
    pm_line(e, "%s%s(%s%s%s);", who, function, id, *lanes ? ", " : "", lanes);
    return;
  }
  pm_begin(e, "%s{", who);
  stop_if(e, pm_str(e, "barrier_sync_timed(smem + %u, %s, %s, %uu, sanitizer)", e->arrivals, id,
                    *lanes ? lanes : "256", add_site(e, op, s)));
  pm_end(e);
}

/* ---- the record ---------------------------------------------------------------------------- */

void pm_describe_site(const pm_program_site *s, int64_t value, uint32_t place, char *buf,
                      size_t n) {
  char what[64], where[64] = "";
  if (s->waits && !*s->ref) {
    snprintf(buf, n, "%s did not end: the others did not come for %d seconds", s->op,
             PM_SANITIZE_SECONDS);
    return;
  }
  if (s->waits) {
    snprintf(buf, n, "%s of '%s' did not end: nothing completed it for %d seconds", s->op, s->ref,
             PM_SANITIZE_SECONDS);
    return;
  }
  if (s->devices || s->blocks) {
    snprintf(buf, n, "%s out of bounds: %s of '%s' to %s %" PRId64 " of a %s of %s%u%s", s->op,
             s->devices ? "remote_ref" : "cluster_ref", s->ref, s->devices ? "device" : "index",
             value, s->devices ? "mesh" : "cluster axis", s->devices ? "" : "size ",
             s->devices ? s->devices : s->blocks, s->devices ? " devices" : "");
    return;
  }
  if (s->size) snprintf(what, sizeof what, "range %" PRId64 ":%" PRId64, value, value + s->size);
  else snprintf(what, sizeof what, "index %" PRId64, value);
  if (place) snprintf(where, sizeof where, " on device %u of the mesh", place - 1);
  snprintf(buf, n, "%s out of bounds: %s of dimension %u lies outside %s'%s' of shape %s%s", s->op,
           what, s->dim, s->of_view ? "a view of " : "", s->ref, s->shape, where);
}
