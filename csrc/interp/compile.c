/* Graph to bytecode.
 *
 * One walk over the regions in program order. The handler of each op appends its instructions,
 * whose operands are first numbers of storages. A storage is a piece of the frame with the range of
 * instructions in which it is live: from its definition to its last use, and to the end of a loop
 * that uses it without having defined it. Values may share a storage: a reshape shares that of its
 * operand, the result of a loop that of its carry. At the end, program.c replaces storage numbers
 * by byte offsets in the frame.
 *
 * The carries of a loop are storages that the loop writes at its end. Nothing else is written
 * twice.
 *
 * What is in SMEM has the places that passes/smem.c planned, so what overlaps there overlaps here.
 */
#include "compile.h"
#include "../ir/mma.h"

static void fail(compiler *c, pm_opid op, pm_code code, const char *what) {
  if (c->status) return;
  c->status = pm_fail(c->err, code, "%s", what);
  pm_err_op(c->err, c->g, op);
}

/* ---- storages ----------------------------------------------------------------------------- */

static size_t bytes_of(const pm_type *t) {
  return (size_t)pm_type_size(t) * pm_dtypes[t->dtype].bytes;
}

static uint32_t new_storage(compiler *c, size_t bytes) {
  storage s = {.bytes = bytes, .start = c->code.n, .end = c->code.n, .fixed = bytes <= 8};
  pm_vec_push(c->temp, &c->storages, s);
  return c->storages.n - 1;
}

/* Mark a use by the instruction that comes next. */
static uint32_t use(compiler *c, uint32_t s) {
  usage u = {s, c->code.n};
  pm_vec_push(c->temp, &c->uses, u);
  return s;
}

static void use_outside(compiler *c, uint32_t *field, uint32_t s) {
  *field = use(c, s);
  pm_vec_push(c->temp, &c->fixups, field);
}

static uint32_t new_constant(compiler *c, pm_dtype d, int64_t n, pm_scalar v, int64_t size,
                             int64_t inner) {
  size_t bytes = (size_t)n * pm_dtypes[d].bytes;
  uint32_t s = new_storage(c, bytes);
  size_t at = (size_t)pm_round_up((int64_t)c->m->image_bytes, n == 1 ? 8 : 64);
  c->storages.at[s].offset = at;
  c->storages.at[s].fixed = c->storages.at[s].image = true;
  c->m->image_bytes = at + (size_t)pm_round_up((int64_t)bytes, 8);
  constant k = {s, d, n, v, size, inner};
  pm_vec_push(c->temp, &c->constants, k);
  return s;
}

static pm_scalar const_value(const pm_graph *g, pm_opid op, pm_dtype d) {
  pm_scalar v;
  int64_t bits = *pm_attr(g, op, PM_ATTR_VALUE);
  if (pm_is_float(d)) {
    memcpy(&v.f, &bits, sizeof v.f);
  } else {
    v.i = bits;
  }
  return v;
}

/* The storage of all elements of an array value. */
static uint32_t full(compiler *c, pm_val v) {
  if (!c->slot[v]) {
    const pm_value *value = pm_value_of(c->g, v);
    const pm_type *t = &value->type;
    c->slot[v] =
        new_constant(c, t->dtype, pm_type_size(t), const_value(c->g, value->def, t->dtype), 0, 0);
  }
  return c->slot[v];
}

static uint32_t define(compiler *c, pm_val v) {
  return c->slot[v] = new_storage(c, bytes_of(pm_typeof(c->g, v)));
}

static instr *emit(compiler *c, pm_opid op, exec_fn exec) {
  instr i = {.exec = exec, .op = op};
  pm_vec_push(c->temp, &c->code, i);
  return &c->code.at[c->code.n - 1];
}

static void emit_jump(compiler *c, pm_opid op, uint32_t to) {
  emit(c, op, c->known->jump)->to = to;
}

/* ---- accesses ----------------------------------------------------------------------------- */

static bool is_view(const pm_graph *g, pm_val v) {
  pm_opid def = pm_value_of(g, v)->def;
  return def && pm_makes_view(pm_get(g, def)->code);
}

static void step_index(compiler *c, access *mem, pm_opid op, view_step *s) {
  uint32_t n, n_strides, next = 1;
  const int64_t *strides = pm_attr_list(c->g, op, PM_ATTR_STRIDES, &n_strides);
  const int64_t *starts = pm_attr_list(c->g, op, PM_ATTR_STARTS, &n);
  const int64_t *sizes = pm_attr_list(c->g, op, PM_ATTR_SIZES, &n);
  for (uint32_t d = 0; d < n; d++) {
    const int64_t size = pm_slice_extent(sizes[d], strides, n_strides, d);
    s->stride[d] = n_strides ? strides[d] : 1;
    s->dropped[d] = sizes[d] == PM_DROPPED;
    s->dynamic[d] = starts[d] == PM_DYNAMIC;
    s->start[d] = starts[d];
    if (s->dynamic[d]) {
      if (mem->n_starts == MAX_STARTS) {
        fail(c, op, PM_E_NOT_IMPLEMENTED,
             "a ref is indexed by more than 24 traced numbers; load "
             "or copy a larger block, or reshape the ref");
        return;
      }
      s->start[d] = mem->n_starts;
      use_outside(c, &mem->starts[mem->n_starts++], full(c, pm_in(c->g, op, next++)));
    }
    if (s->dynamic[d] || starts[d] < 0 || starts[d] + size > s->in_dim[d]) {
      start_check k = {s->dynamic[d], s->start[d], s->in_dim[d] - size, (uint16_t)mem->n_steps,
                       (uint16_t)d};
      mem->checks[mem->n_checks++] = k;
    }
  }
}

/* The steps from the view to its base, and the starts to check. */
static void add_steps(compiler *c, access *mem, pm_val ref) {
  const pm_graph *g = c->g;
  uint32_t depth = 0;
  pm_val v = ref;
  for (; is_view(g, v); v = pm_in(g, pm_value_of(g, v)->def, 0)) depth++;
  mem->steps = PM_NEW(&c->m->arena, view_step, depth);
  mem->starts = PM_NEW(&c->m->arena, uint32_t, MAX_STARTS);
  mem->checks = PM_NEW(&c->m->arena, start_check, depth * PM_MAX_RANK);
  for (v = ref; is_view(g, v) && !c->status;) {
    pm_opid op = pm_value_of(g, v)->def;
    step_back *const back = c->known->ops[pm_get(g, op)->code]->back;
    if (!back) {
      v = pm_in(g, op, 0);
      continue;
    }
    const pm_type *out = pm_typeof(g, v), *in = pm_typeof(g, pm_in(g, op, 0));
    view_step *s = &mem->steps[mem->n_steps];
    s->back = back;
    s->in_rank = in->rank;
    s->out_rank = out->rank;
    memcpy(s->in_dim, in->dim, sizeof s->in_dim);
    memcpy(s->out_dim, out->dim, sizeof s->out_dim);
    if (pm_has_attr(g, op, PM_ATTR_STARTS)) step_index(c, mem, op, s);
    if (pm_has_attr(g, op, PM_ATTR_DIMS)) {
      uint32_t n;
      const int64_t *perm = pm_attr_list(g, op, PM_ATTR_DIMS, &n);
      for (uint32_t d = 0; d < n && d < PM_MAX_RANK; d++) s->perm[d] = (uint8_t)perm[d];
    }
    mem->n_steps++;
    v = pm_in(g, op, 0);
  }
}

static const char *ref_name(compiler *c, const pm_view *view) {
  const pm_graph *g = c->g;
  uint32_t name = pm_value_of(g, view->base)->name;
  if (name) return pm_strdup(&c->m->arena, g->strings.at[name], strlen(g->strings.at[name]));
  if (view->param < 0) {
    uint8_t kind = pm_typeof(g, view->base)->kind;
    if (kind == PM_SEMAPHORE) return "semaphore";
    return kind == PM_BARRIER ? "barrier" : view->space == PM_ACC ? "accumulator" : "smem";
  }
  uint32_t k = (uint32_t)view->param;
  if (k < g->n_operands) return pm_printf(&c->m->arena, "operand %u", k);
  return pm_printf(&c->m->arena, "output %u", k - g->n_operands);
}

/* The loops of a strided array: merged sizes and strides, in order. */
static void set_loops(access *mem, uint32_t rank, const int64_t *size, const int64_t *stride) {
  uint32_t n = 0;
  for (uint32_t d = 0; d < rank; d++) {
    if (size[d] == 1) continue;
    if (n && mem->loop_stride[n - 1] == size[d] * stride[d]) {
      mem->loop_size[n - 1] *= size[d];
      mem->loop_stride[n - 1] = stride[d];
    } else {
      mem->loop_size[n] = size[d];
      mem->loop_stride[n++] = stride[d];
    }
  }
  if (!n) {
    mem->loop_size[0] = 1;
    mem->loop_stride[n++] = 1;
  }
  mem->n_loops = (uint8_t)n;
  mem->contiguous = n == 1 && (mem->loop_stride[0] == 1 || mem->loop_size[0] == 1);
}

static void set_dims(compiler *c, pm_opid op, access *mem, const pm_view *view) {
  int64_t size[MAX_LOOPS], stride[MAX_LOOPS];
  uint32_t n = 0;
  mem->n = 1;
  for (uint32_t d = 0; d < view->rank; d++) {
    const pm_view_dim *v = &view->dim[d];
    mem->n *= v->size;
    mem->dim[d] = v->size;
    mem->stride[d] = v->inner;
    if (v->tile && v->tile < v->size) {
      if (v->size % v->tile) fail(c, op, PM_E_INTERNAL, "a view splits a dimension unevenly");
      mem->stride[d] = -1;
      size[n] = v->size / v->tile;
      stride[n++] = v->outer;
      size[n] = v->tile;
      stride[n++] = v->inner;
    } else {
      size[n] = v->size;
      stride[n++] = v->inner;
    }
  }
  set_loops(mem, n, size, stride);
}

/* The use of a ref or barrier by the op whose instruction comes next; NULL on failure. */
static const indexing *make_indexing(compiler *c, pm_opid op) {
  const pm_graph *g = c->g;
  const pm_op *o = pm_get(g, op);
  uint32_t n = 0;
  const int64_t *dims = pm_is_masked(o->code) ? pm_attr_list(g, op, PM_ATTR_DIMS, &n) : NULL;
  if (!n) return NULL;
  const uint32_t first = pm_n_beside(pm_atomic_of(g, op));
  const pm_type *shape = pm_typeof(g, pm_in(g, op, first));
  indexing *by = PM_NEW(&c->m->arena, indexing, 1);
  by->rank = shape->rank;
  by->size = pm_type_size(shape);
  memcpy(by->dim, shape->dim, sizeof by->dim);
  for (uint32_t d = 0; d < n; d++) by->from[d] = (int8_t)dims[d];
  for (uint32_t k = first; k < o->n_in; k++)
    use_outside(c, &by->slot[by->n++], full(c, pm_in(g, op, k)));
  return by;
}

static const access *make_access(compiler *c, pm_opid op, pm_val ref) {
  pm_view view;
  pm_code code = pm_view_of(c->g, ref, false, &view, c->err);
  if (code) {
    c->status = code;
    pm_err_op(c->err, c->g, op);
    return NULL;
  }
  access *mem = PM_NEW(&c->m->arena, access, 1);
  const pm_type *base = pm_typeof(c->g, view.base);
  mem->name = ref_name(c, &view);
  mem->by = make_indexing(c, op);
  mem->kind = base->kind;
  mem->space = view.space;
  mem->dtype = view.dtype;
  mem->bytes = base->kind == PM_BARRIER ? 1 : pm_dtypes[view.dtype].bytes;
  mem->rank = view.rank;
  mem->base_rank = base->rank;
  memcpy(mem->base_dim, base->dim, sizeof mem->base_dim);
  mem->offset = view.offset;
  if (view.space == PM_TMEM) {
    pm_tmem *tmem = PM_NEW(&c->m->arena, pm_tmem, 1);
    *tmem = pm_tmem_of(c->g, view.alloc);
    mem->tmem = tmem;
  }
  set_dims(c, op, mem, &view);
  if (view.param >= 0) {
    mem->base = (uint32_t)view.param;
  } else if (base->kind == PM_REF && view.space == PM_ACC) {
    use_outside(c, &mem->base, c->slot[view.base]);
  } else {
    mem->base = c->alloc[view.base];
    mem->apart = c->apart[view.base];
  }
  if (view.cluster_val) {
    mem->cluster_dim = (uint8_t)view.cluster_dim;
    use_outside(c, &mem->cluster_slot, full(c, view.cluster_val));
  }
  mem->all_devices = view.all_devices;
  if (view.device_val) use_outside(c, &mem->device_slot, full(c, view.device_val));
  mem->terms = PM_NEW(&c->m->arena, struct access_term, view.n_terms);
  for (; mem->n_terms < view.n_terms; mem->n_terms++) {
    const pm_term *t = &view.term[mem->n_terms];
    mem->terms[mem->n_terms].mul = t->mul;
    mem->terms[mem->n_terms].div = t->div ? t->div : 1;
    use_outside(c, &mem->terms[mem->n_terms].slot, full(c, t->val));
  }
  add_steps(c, mem, ref);
  return c->status ? NULL : mem;
}

/* ---- plain ops ---------------------------------------------------------------------------- */

void pm_vm_encode_nothing(compiler *c, pm_opid op, const handler *h) { (void)c, (void)op, (void)h; }

void pm_vm_encode_alias(compiler *c, pm_opid op, const handler *h) {
  (void)h;
  pm_val in = pm_in(c->g, op, 0), out = pm_get(c->g, op)->out;
  c->slot[out] = full(c, in);
}

void pm_vm_encode_multiple(compiler *c, pm_opid op, const handler *h) {
  pm_val in = pm_in(c->g, op, 0);
  uint32_t slot = use(c, full(c, in));
  instr *i = emit(c, op, h->exec);
  i->a = slot;
  i->dtype = pm_typeof(c->g, in)->dtype;
  i->to = (uint32_t)*pm_attr(c->g, op, PM_ATTR_MULTIPLE);
  pm_vm_encode_alias(c, op, h);
}

void pm_vm_encode_const(compiler *c, pm_opid op, const handler *h) {
  (void)h;
  pm_val v = pm_get(c->g, op)->out;
  const pm_type *t = pm_typeof(c->g, v);
  c->splat[v] = new_constant(c, t->dtype, 1, const_value(c->g, op, t->dtype), 0, 0);
  if (!t->rank) c->slot[v] = c->splat[v];
}

void pm_vm_encode_iota(compiler *c, pm_opid op, const handler *h) {
  (void)h;
  pm_val v = pm_get(c->g, op)->out;
  const pm_type *t = pm_typeof(c->g, v);
  int64_t dim = *pm_attr(c->g, op, PM_ATTR_DIM), inner = 1;
  for (uint32_t d = (uint32_t)dim + 1; d < t->rank; d++) inner *= t->dim[d];
  c->slot[v] = new_constant(c, t->dtype, pm_type_size(t), (pm_scalar){0}, t->dim[dim], inner);
}

/* The graph is bound to one call: sizes.h */
void pm_vm_encode_size(compiler *c, pm_opid op, const handler *h) {
  (void)h;
  const pm_val v = pm_get(c->g, op)->out;
  const int64_t n = c->g->sizes.at[*pm_attr(c->g, op, PM_ATTR_N)].least;
  c->slot[v] = new_constant(c, pm_typeof(c->g, v)->dtype, 1, (pm_scalar){.i = n}, 0, 0);
}

void pm_vm_encode_axis(compiler *c, pm_opid op, const handler *h) {
  pm_val v = pm_get(c->g, op)->out;
  uint32_t slot = define(c, v);
  instr *i = emit(c, op, h->exec);
  i->dst = slot;
  i->out = pm_typeof(c->g, v)->dtype;
  i->flags = (uint8_t)*pm_attr(c->g, op, PM_ATTR_AXIS);
  i->to = (uint32_t)*pm_attr(c->g, op, PM_ATTR_DIM);
}

void pm_vm_encode_pointwise(compiler *c, pm_opid op, const handler *h) {
  const pm_op *o = pm_get(c->g, op);
  const pm_type *out = pm_typeof(c->g, o->out);
  instr i = {.exec = h->exec, .op = op, .n = (uint32_t)pm_type_size(out), .out = out->dtype};
  uint32_t *slots[] = {&i.a, &i.b, &i.c};
  for (uint32_t k = 0; k < o->n_in; k++) {
    pm_val v = pm_in(c->g, op, k);
    bool one = pm_typeof(c->g, v)->rank == 0 || c->splat[v];
    *slots[k] = use(c, one && c->splat[v] ? c->splat[v] : full(c, v));
    if (one && i.n > 1) i.flags |= (uint8_t)(SPLAT_X << k);
    i.dtype = pm_typeof(c->g, v)->dtype; /* of the last: SELECT's first is the predicate */
  }
  if (pm_is_narrow_float(i.dtype) && !h->kernels[i.dtype]) {
    i.flags |= WIDEN;
    if (i.out == i.dtype) i.flags |= NARROW;
    i.kernel = h->kernels[PM_F32];
  } else {
    i.kernel = h->kernels[i.dtype];
  }
  if (!i.kernel) {
    fail(c, op, PM_E_NOT_IMPLEMENTED,
         pm_printf(c->temp, "%s of %s is not in the interpreter; convert to a wider dtype first",
                   pm_op_name(o->code), pm_dtypes[i.dtype].text));
    return;
  }
  i.dst = define(c, o->out);
  pm_vec_push(c->temp, &c->code, i);
}

/* See instr.lowered. */
static bool is_lowered(const pm_graph *g, pm_opid op) {
  if (pm_has_attr(g, op, PM_ATTR_ENGINE)) return *pm_attr(g, op, PM_ATTR_ENGINE) == PM_ENGINE_PLAIN;
  if (pm_has_attr(g, op, PM_ATTR_PLACED)) return *pm_attr(g, op, PM_ATTR_PLACED);
  return pm_has_attr(g, op, PM_ATTR_ORDER) && *pm_attr(g, op, PM_ATTR_ORDER) == PM_ORDER_RELAXED;
}

/* The instruction writes to the ref. */
static void note_written(compiler *c, const access *mem) {
  if (mem->space == PM_GMEM && mem->kind == PM_REF) c->m->args[mem->base].written = true;
}

/* Arrays become slots a, b, c and refs become mem, mem2, mem3, each in their order. */
void pm_vm_encode_plain(compiler *c, pm_opid op, const handler *h) {
  const pm_graph *g = c->g;
  const pm_op *o = pm_get(g, op);
  instr i = {.exec = h->exec, .op = op};
  uint32_t *slots[] = {&i.a, &i.b, &i.c}, n_slots = 0, n_refs = 0;
  for (uint32_t k = 0; k < o->n_in; k++) {
    pm_val v = pm_in(g, op, k);
    const pm_type *t = pm_typeof(g, v);
    if (i.mem && i.mem->by && k >= o->n_in - i.mem->by->n) break;
    if (t->kind == PM_ARRAY) {
      *slots[n_slots++] = use(c, full(c, v));
      i.n = (uint32_t)pm_type_size(t);
    } else {
      const access *mem = make_access(c, op, v);
      if (!mem) return;
      *(n_refs == 0 ? &i.mem : n_refs == 1 ? &i.mem2 : &i.mem3) = mem;
      n_refs++;
    }
    if (!k) i.dtype = t->dtype;
  }
  if (o->n_out) {
    i.dst = define(c, o->out);
    i.out = pm_typeof(g, o->out)->dtype;
    i.n = (uint32_t)pm_type_size(pm_typeof(g, o->out));
  }
  static const uint8_t flag_attrs[] = {PM_ATTR_OOB, PM_ATTR_COMMIT, PM_ATTR_READ_ONLY,
                                       PM_ATTR_DECREMENT};
  for (uint32_t k = 0; k < PM_COUNT(flag_attrs); k++) {
    if (pm_has_attr(g, op, flag_attrs[k])) i.flags = (uint8_t)*pm_attr(g, op, flag_attrs[k]);
  }
  i.lowered = is_lowered(g, op);
  if (i.mem && pm_typeof(g, pm_in(g, op, 0))->kind == PM_SEMAPHORE) {
    c->m->meets_blocks |= i.mem->space == PM_GMEM;
    note_written(c, i.mem);
  }
  if (pm_has_attr(g, op, PM_ATTR_N)) i.to = (uint32_t)*pm_attr(g, op, PM_ATTR_N);
  pm_vec_push(c->temp, &c->code, i);
}

void pm_vm_encode_store(compiler *c, pm_opid op, const handler *h) {
  pm_vm_encode_plain(c, op, h);
  if (!c->status) note_written(c, c->code.at[c->code.n - 1].mem);
}

/* dtype: of b; of one in an accumulator, out: of a; of one in registers, depth by to: shape of b */
void pm_vm_encode_product(compiler *c, pm_opid op, const handler *h) {
  const pm_graph *g = c->g;
  const pm_type *acc = pm_typeof(g, pm_in(g, op, 0)), *b = pm_typeof(g, pm_in(g, op, 2));
  const size_t bytes = pm_vm_pack_bytes(acc->dim[0], acc->dim[1], b->dim[0]);
  pm_vm_encode_plain(c, op, h);
  if (c->status) return;
  instr *i = &c->code.at[c->code.n - 1];
  if (bytes > c->m->pack_bytes) c->m->pack_bytes = bytes;
  i->dtype = b->dtype;
  if (acc->kind != PM_ARRAY) {
    i->out = pm_typeof(g, pm_in(g, op, 1))->dtype;
    return;
  }
  i->depth = b->dim[0];
  i->to = (uint32_t)b->dim[1];
}

/* flags: what an ATOMIC does; to: which operands after the ref have one element for all, a bit
 * each */
void pm_vm_encode_masked(compiler *c, pm_opid op, const handler *h) {
  const pm_op *o = pm_get(c->g, op);
  pm_vm_encode_plain(c, op, h);
  if (c->status) return;
  instr *i = &c->code.at[c->code.n - 1];
  i->to = 0;
  for (uint32_t k = 1; k < o->n_in; k++) {
    if (!pm_typeof(c->g, pm_in(c->g, op, k))->rank) i->to |= 1u << (k - 1);
  }
  if (pm_has_attr(c->g, op, PM_ATTR_ATOMIC)) i->flags = (uint8_t)*pm_attr(c->g, op, PM_ATTR_ATOMIC);
}

void pm_vm_encode_masked_store(compiler *c, pm_opid op, const handler *h) {
  pm_vm_encode_masked(c, op, h);
  if (!c->status) note_written(c, c->code.at[c->code.n - 1].mem);
}

void pm_vm_encode_reduce_devices(compiler *c, pm_opid op, const handler *h) {
  pm_vm_encode_plain(c, op, h);
  if (!c->status) {
    c->code.at[c->code.n - 1].flags = (uint8_t)*pm_attr(c->g, op, PM_ATTR_ATOMIC);
  }
}

/* May kernels write the memory? */
static bool is_written(const pm_graph *g, const access *mem) {
  if (mem->space != PM_GMEM || mem->base >= g->n_operands) return true;
  for (uint32_t k = 0; k < g->n_outputs; k++) {
    if (g->alias && g->alias[k] == (int32_t)mem->base) return true;
  }
  return false;
}

void pm_vm_encode_inline(compiler *c, pm_opid op, const handler *h) {
  const pm_graph *g = c->g;
  const pm_op *o = pm_get(g, op);
  inlined *x = PM_NEW(&c->m->arena, inlined, 1);
  x->function = *pm_attr(g, op, PM_ATTR_INTERPRET);
  x->n_in = o->n_in;
  x->n_out = pm_inline_results(g, op, NULL);
  pm_val *out = PM_NEW(c->temp, pm_val, x->n_out);
  pm_inline_results(g, op, out);
  if (!x->function) {
    fail(c, op, PM_E_NOT_IMPLEMENTED,
         "inline_cuda: this source cannot run on the interpreter, it has no function that "
         "replaces it; give inline_cuda interpret=, or call the kernel with arrays of a GPU");
    return;
  }
  x->value = PM_NEW(&c->m->arena, struct inlined_value, x->n_in + x->n_out);
  for (uint32_t k = 0; k < x->n_in + x->n_out; k++) {
    struct inlined_value *v = &x->value[k];
    const pm_val val = k < x->n_in ? pm_in(g, op, k) : out[k - x->n_in];
    const pm_type *t = pm_typeof(g, val);
    if (t->kind != PM_ARRAY && !(v->mem = make_access(c, op, val))) return;
    if (t->kind != PM_BARRIER) v->bytes = pm_type_size(t) * pm_dtypes[t->dtype].bytes;
    if (t->kind == PM_ARRAY) use_outside(c, &v->slot, k < x->n_in ? full(c, val) : define(c, val));
    v->written = k >= x->n_in || (t->kind == PM_REF && is_written(g, v->mem));
    if (v->written && v->mem) note_written(c, v->mem);
  }
  emit(c, op, h->exec)->inlined = x;
}

/* ---- tensor memory ------------------------------------------------------------------------- */

/* A ref in TMEM: its place among the operands. */
static uint8_t add_tmem(compiler *c, pm_opid op, tensor_op *x, pm_val ref) {
  if (!ref || !(x->tmem[x->n_tmem] = make_access(c, op, ref))) return 0;
  return (uint8_t)x->n_tmem++;
}

/* Of machine.pack. */
static size_t tensor_bytes(const tensor_op *x) {
  const size_t n = (size_t)(x->m * x->n), wide = (size_t)((x->m + 1 + x->n) * x->k);
  return (n + (pm_vm_is_widened(x) ? wide : 0)) * sizeof(float) +
         pm_vm_pack_bytes(x->m, x->n, x->k);
}

static void add_product(compiler *c, pm_opid op, tensor_op *x) {
  const pm_tcgen05 p = pm_tcgen05_of(c->g, op);
  add_tmem(c, op, x, p.acc);
  x->a_tmem = p.in_tmem ? add_tmem(c, op, x, p.a) : 0;
  x->a = p.in_tmem ? NULL : make_access(c, op, p.a);
  x->b = make_access(c, op, p.b);
  x->a_scale = add_tmem(c, op, x, p.a_scale);
  x->b_scale = add_tmem(c, op, x, p.b_scale);
  x->metadata = add_tmem(c, op, x, p.metadata);
  use_outside(c, &x->accumulate, full(c, p.accumulate));
  x->a_dtype = p.row->a;
  x->b_dtype = p.row->b;
  x->packed = (uint8_t)p.packed;
  x->m = p.m;
  x->n = p.n;
  x->k = p.k;
  x->block = p.block;
  const size_t bytes = tensor_bytes(x);
  if (bytes > c->m->pack_bytes) c->m->pack_bytes = bytes;
}

/* A product, a copy to TMEM, or a commit. */
void pm_vm_encode_tensor(compiler *c, pm_opid op, const handler *h) {
  tensor_op *x = PM_NEW(&c->m->arena, tensor_op, 1);
  const pm_type *first = pm_typeof(c->g, pm_in(c->g, op, 0));
  x->name = pm_op_name(pm_get(c->g, op)->code);
  x->pair = *pm_attr(c->g, op, PM_ATTR_PAIR);
  if (x->pair) {
    x->number = c->pair_ops.n;
    pm_vec_push(&c->m->arena, &c->pair_ops, ((struct pair_op){op, x->name}));
  }
  if (first->space == PM_TMEM) {
    add_product(c, op, x);
  } else if (first->kind == PM_BARRIER) {
    x->barrier = make_access(c, op, pm_in(c->g, op, 0));
  } else {
    x->a = make_access(c, op, pm_in(c->g, op, 0));
    add_tmem(c, op, x, pm_in(c->g, op, 1));
  }
  if (!c->status) emit(c, op, h->exec)->tensor = x;
}

/* n rows of `to` elements */
void pm_vm_encode_reduced(compiler *c, pm_opid op, const handler *h) {
  pm_vm_encode_plain(c, op, h);
  if (c->status) return;
  instr *i = &c->code.at[c->code.n - 1];
  i->to = (uint32_t)pm_typeof(c->g, pm_in(c->g, op, 0))->dim[1];
  i->flags = (uint8_t)*pm_attr(c->g, op, PM_ATTR_TMEM_REDUCE);
}

void pm_vm_encode_rows_out(compiler *c, pm_opid op, const handler *h) {
  pm_vm_encode_plain(c, op, h);
  if (!c->status) note_written(c, c->code.at[c->code.n - 1].mem2);
}

static void alloc_tmem(compiler *c, pm_opid op, pm_val v) {
  const pm_tmem m = pm_tmem_of(c->g, op);
  struct open_scope *o = m.pair ? c->whole : c->open;
  scope *s = o->scope;
  const uint32_t name = pm_value_of(c->g, v)->name;
  const char *text = name ? c->g->strings.at[name] : "tmem";
  if (s->n_tmem == o->tmem_cap) {
    s->tmem =
        pm_vec_grow(&c->m->arena, s->tmem, s->n_tmem, &o->tmem_cap, sizeof *s->tmem, s->n_tmem + 1);
  }
  s->tmem[s->n_tmem++] =
      (struct tmem_alloc){.name = pm_strdup(&c->m->arena, text, strlen(text)), .op = op, .tmem = m};
}

void pm_vm_encode_section(compiler *c, pm_opid op, const handler *h) {
  c->m->n_section = (uint32_t)*pm_attr(c->g, op, PM_ATTR_N);
  pm_vm_encode_plain(c, op, h);
}

/* n: the axes it is multicast along, a bit each; to: its number among the collective copies */
void pm_vm_encode_copy_in(compiler *c, pm_opid op, const handler *h) {
  uint32_t n;
  const int64_t *axes = pm_attr_list(c->g, op, PM_ATTR_CLUSTER, &n);
  pm_vm_encode_plain(c, op, h);
  if (c->status) return;
  instr *i = &c->code.at[c->code.n - 1];
  i->n = 0;
  for (uint32_t k = 0; k < n; k++) i->n |= 1u << axes[k];
  i->leader = *pm_attr(c->g, op, PM_ATTR_LEADER);
  if (n) i->to = c->m->n_shared_copies++;
  const bool clips = *pm_attr(c->g, op, PM_ATTR_ENGINE) == PM_ENGINE_TMA;
  if (i->flags == PM_OOB_PROMISE_IN_BOUNDS && clips) i->flags = PROMISED_AND_CLIPPED;
}

/* to: how it combines with what is there */
void pm_vm_encode_copy_out(compiler *c, pm_opid op, const handler *h) {
  pm_vm_encode_plain(c, op, h);
  if (c->status) return;
  instr *i = &c->code.at[c->code.n - 1];
  i->to = (uint32_t)*pm_attr(c->g, op, PM_ATTR_COMBINE);
  note_written(c, i->mem2);
}

/* BROADCAST, SLICE and TRANSPOSE: a strided walk over the operand. */
void pm_vm_encode_strided(compiler *c, pm_opid op, const handler *h) {
  const pm_graph *g = c->g;
  pm_val in = pm_in(g, op, 0), out = pm_get(g, op)->out;
  const pm_type *from = pm_typeof(g, in), *to = pm_typeof(g, out);
  access *mem = PM_NEW(&c->m->arena, access, 1);
  int64_t stride[PM_MAX_RANK] = {0}, s = 1;
  uint32_t n;
  mem->kind = PM_ARRAY;
  mem->dtype = from->dtype;
  mem->bytes = pm_dtypes[from->dtype].bytes;
  mem->n = pm_type_size(to);
  const bool slice = pm_rule_of(g, op) == PM_LAY_SLICE;
  const bool transpose = pm_rule_of(g, op) == PM_LAY_TRANSPOSE;
  const int64_t *list = pm_attr_list(g, op, slice ? PM_ATTR_STARTS : PM_ATTR_DIMS, &n);
  const int64_t *sizes = slice ? pm_attr_list(g, op, PM_ATTR_SIZES, &n) : NULL;
  for (uint32_t d = from->rank, o = to->rank; d-- > 0; s *= from->dim[d]) {
    for (uint32_t k = 0; transpose && k < to->rank; k++) {
      if (list[k] == d) stride[k] = s;
    }
    if (transpose) continue;
    if (!slice) {
      stride[list[d]] = from->dim[d] == 1 ? 0 : s;
      continue;
    }
    mem->offset += list[d] * s;
    if (sizes[d] != PM_DROPPED) stride[--o] = s;
  }
  set_loops(mem, to->rank, to->dim, stride);
  bool one = !slice && !transpose && c->splat[in];
  use_outside(c, &mem->base, one ? c->splat[in] : full(c, in));
  if (one) set_loops(mem, 1, &mem->n, (const int64_t[]){0});
  uint32_t slot = define(c, out);
  instr *i = emit(c, op, h->exec);
  i->mem = mem;
  i->dst = slot;
}

/* One instruction for each operand: its rows go to their place in the result. */
void pm_vm_encode_concat(compiler *c, pm_opid op, const handler *h) {
  const pm_graph *g = c->g;
  const uint32_t n_in = pm_get(g, op)->n_in;
  const pm_val out = pm_get(g, op)->out;
  const pm_type *t = pm_typeof(g, out);
  const int64_t dim = *pm_attr(g, op, PM_ATTR_DIM);
  int64_t inner = pm_dtypes[t->dtype].bytes, outer = 1, at = 0;
  for (int64_t d = 0; d < dim; d++) outer *= t->dim[d];
  for (int64_t d = dim + 1; d < t->rank; d++) inner *= t->dim[d];
  const uint32_t slot = define(c, out);
  for (uint32_t k = 0; k < n_in; k++) {
    const pm_val v = pm_in(g, op, k);
    rows *r = PM_NEW(&c->m->arena, rows, 1);
    const int64_t bytes = pm_typeof(g, v)->dim[dim] * inner;
    *r = (rows){.n = outer, .bytes = bytes, .step = t->dim[dim] * inner, .at = at};
    at += bytes;
    const uint32_t from = use(c, full(c, v));
    use(c, slot);
    instr *i = emit(c, op, h->exec);
    i->rows = r;
    i->a = from;
    i->dst = slot;
  }
  use(c, slot);
}

/* n: indices; to: elements of the array that they are of */
void pm_vm_encode_indexed(compiler *c, pm_opid op, const handler *h) {
  pm_vm_encode_plain(c, op, h);
  if (c->status) return;
  instr *i = &c->code.at[c->code.n - 1];
  i->n = (uint32_t)pm_type_size(pm_typeof(c->g, pm_in(c->g, op, 1)));
  i->to = (uint32_t)pm_type_size(pm_typeof(c->g, pm_in(c->g, op, 0)));
}

void pm_vm_encode_scan(compiler *c, pm_opid op, const handler *h) {
  const pm_graph *g = c->g;
  const pm_val in = pm_in(g, op, 0);
  const pm_type *t = pm_typeof(g, in);
  const int64_t dim = *pm_attr(g, op, PM_ATTR_DIM);
  const bool half = pm_is_narrow_float(t->dtype);
  reduction *r = PM_NEW(&c->m->arena, reduction, 1);
  r->kernel =
      c->known->reductions[*pm_attr(g, op, PM_ATTR_REDUCE)]->kernels[half ? PM_F32 : t->dtype];
  r->n = 1;
  r->group[0].outer = r->group[0].inner = 1;
  r->group[0].size = t->dim[dim];
  for (int64_t d = 0; d < t->rank; d++) {
    if (d < dim) r->group[0].outer *= t->dim[d];
    if (d > dim) r->group[0].inner *= t->dim[d];
  }
  instr i = {.exec = h->exec, .op = op, .n = (uint32_t)pm_type_size(t), .dtype = t->dtype};
  i.reduction = r;
  i.out = (uint8_t)(half ? PM_F32 : t->dtype);
  i.a = use(c, full(c, in));
  i.dst = define(c, pm_get(g, op)->out);
  i.b = use(c, new_storage(c, i.n * pm_dtypes[i.out].bytes));
  pm_vec_push(c->temp, &c->code, i);
}

void pm_vm_encode_reduce(compiler *c, pm_opid op, const handler *h) {
  const pm_graph *g = c->g;
  pm_val in = pm_in(g, op, 0), out = pm_get(g, op)->out;
  const pm_type *t = pm_typeof(g, in);
  uint32_t n;
  const int64_t *dims = pm_attr_list(g, op, PM_ATTR_DIMS, &n);
  pm_dtype work = pm_is_narrow_float(t->dtype) ? PM_F32 : t->dtype;
  reduction *r = PM_NEW(&c->m->arena, reduction, 1);
  r->kernel = c->known->reductions[*pm_attr(g, op, PM_ATTR_REDUCE)]->kernels[work];
  bool gone[PM_MAX_RANK] = {0};
  for (uint32_t k = 0; k < n; k++) gone[dims[k]] = true;
  int64_t inner = 1;
  for (uint32_t d = t->rank; d-- > 0;) { /* innermost first: what is inside is final */
    if (!gone[d]) {
      inner *= t->dim[d];
      continue;
    }
    int64_t size = t->dim[d], outer = 1;
    while (d > 0 && gone[d - 1]) size *= t->dim[--d];
    for (uint32_t e = 0; e < d; e++) outer *= t->dim[e];
    r->group[r->n].outer = outer;
    r->group[r->n].size = size;
    r->group[r->n++].inner = inner;
  }
  r->n_out = pm_type_size(pm_typeof(g, out));
  instr i = {.exec = h->exec, .op = op, .n = (uint32_t)pm_type_size(t), .dtype = t->dtype};
  i.reduction = r;
  i.out = work;
  i.a = use(c, full(c, in));
  i.dst = define(c, out);
  i.b = use(c, new_storage(c, i.n * pm_dtypes[work].bytes));
  pm_vec_push(c->temp, &c->code, i);
}

void pm_vm_encode_print(compiler *c, pm_opid op, const handler *h) {
  const pm_op *o = pm_get(c->g, op);
  printing *p = pm_alloc(&c->m->arena, sizeof *p + o->n_in * sizeof p->arg[0]);
  const char *format = c->g->strings.at[*pm_attr(c->g, op, PM_ATTR_FORMAT)];
  p->format = pm_strdup(&c->m->arena, format, strlen(format));
  p->label = pm_has_attr(c->g, op, PM_ATTR_LABEL) && *pm_attr(c->g, op, PM_ATTR_LABEL);
  p->n = o->n_in;
  for (uint32_t k = 0; k < o->n_in; k++) {
    pm_val v = pm_in(c->g, op, k);
    const pm_type *t = pm_typeof(c->g, v);
    p->arg[k].dtype = t->dtype;
    p->arg[k].rank = t->rank;
    p->arg[k].n = pm_type_size(t);
    memcpy(p->arg[k].dim, t->dim, sizeof t->dim);
    use_outside(c, &p->arg[k].slot, full(c, v));
  }
  emit(c, op, h->exec)->printing = p;
}

void pm_vm_encode_named_scope(compiler *c, pm_opid op, const handler *h) {
  instr *i = emit(c, op, h->exec);
  i->to = (uint32_t)*pm_attr(c->g, op, PM_ATTR_N);
  i->n = (uint32_t)*pm_attr(c->g, op, PM_ATTR_ENDS);
}

/* ---- allocations and scopes ----------------------------------------------------------------- */

/* What other blocks reach has contents and phases before this block enters its scope, and after. */
static struct open_scope *scope_for(compiler *c, pm_val v) {
  return c->shared[v] ? c->whole : c->open;
}

bool pm_vm_reaches_always(const pm_machine *m, const pm_graph *g, pm_opid op) {
  return (void)m, (void)g, (void)op, true;
}

bool pm_vm_reaches_cluster(const pm_machine *m, const pm_graph *g, pm_opid op) {
  return (void)g, (void)op, m->n_blocks > 1;
}

bool pm_vm_reaches_pair(const pm_machine *m, const pm_graph *g, pm_opid op) {
  return (void)m, *pm_attr(g, op, PM_ATTR_PAIR);
}

bool pm_vm_reaches_axes(const pm_machine *m, const pm_graph *g, pm_opid op) {
  uint32_t n;
  pm_attr_list(g, op, PM_ATTR_CLUSTER, &n);
  return (void)m, n > 0;
}

bool pm_vm_reaches_copy(const pm_machine *m, const pm_graph *g, pm_opid op) {
  return pm_vm_reaches_axes(m, g, op) || *pm_attr(g, op, PM_ATTR_LEADER);
}

static void note_shared(pm_graph *g, pm_opid op, void *ctx) {
  compiler *c = ctx;
  const pm_op *o = pm_get(g, op);
  const handler *h = c->known->ops[o->code];
  if (!h->reaches || !h->reaches(c->m, g, op)) return;
  for (uint32_t k = 0; k < o->n_in; k++) {
    const pm_val v = pm_in(g, op, k);
    if (pm_typeof(g, v)->kind != PM_ARRAY) c->shared[pm_view_base(g, v)] = true;
  }
  c->shared[o->out] = o->n_out;
}

static void alloc_smem(compiler *c, pm_opid op, pm_val v, const pm_type *t) {
  struct open_scope *o = scope_for(c, v);
  scope *s = o->scope;
  c->alloc[v] = (uint32_t)*pm_attr(c->g, op, PM_ATTR_OFFSET);
  c->apart[v] = (uint32_t)*pm_attr(c->g, op, PM_ATTR_APART);
  if (s->n_smem == o->smem_cap) {
    s->smem =
        pm_vec_grow(&c->m->arena, s->smem, s->n_smem, &o->smem_cap, sizeof *s->smem, s->n_smem + 1);
  }
  const uint32_t name = pm_value_of(c->g, v)->name;
  const char *text = name ? c->g->strings.at[name] : "smem";
  s->smem[s->n_smem++] = (struct smem_alloc){.name = pm_strdup(&c->m->arena, text, strlen(text)),
                                             .at = c->alloc[v],
                                             .apart = c->apart[v],
                                             .dtype = t->dtype,
                                             .op = op,
                                             .n = pm_type_size(t)};
}

static void set_groups(compiler *c, pm_opid op, barrier_info *info) {
  uint32_t n;
  const int64_t *list = pm_attr_list(c->g, op, PM_ATTR_CLUSTER, &n);
  for (uint32_t k = 0; k < n; k++) {
    if (list[k] < 0) {
      info->n_groups++;
    } else {
      info->group[list[k]] = (uint8_t)(info->n_groups + 1);
    }
  }
}

static void alloc_barrier(compiler *c, pm_opid op, pm_val v, const pm_type *t) {
  struct open_scope *o = scope_for(c, v);
  scope *s = o->scope;
  uint32_t name = pm_value_of(c->g, v)->name;
  const char *text = name ? c->g->strings.at[name] : "barrier";
  barrier_info info = {.name = pm_strdup(&c->m->arena, text, strlen(text)),
                       .first = c->n_barriers,
                       .count = (uint32_t)pm_type_size(t),
                       .arrivals = (uint32_t)pm_barrier_arrivals(c->g, op),
                       .shared = c->shared[v],
                       .again = pm_in_loop(c->g, op),
                       .leader = *pm_attr(c->g, op, PM_ATTR_LEADER),
                       .tensor_core = *pm_attr(c->g, op, PM_ATTR_TENSOR_CORE),
                       .rank = t->rank,
                       .op = op};
  set_groups(c, op, &info);
  memcpy(info.dim, t->dim, sizeof info.dim);
  c->alloc[v] = info.first;
  c->n_barriers += info.count;
  pm_vec_push(&c->m->arena, &c->bars, info);
  if (s->n_bars == o->bar_cap) {
    s->bars =
        pm_vec_grow(&c->m->arena, s->bars, s->n_bars, &o->bar_cap, sizeof *s->bars, s->n_bars + 1);
  }
  s->bars[s->n_bars++] = c->bars.n - 1;
}

static void alloc_semaphore(compiler *c, pm_val v, const pm_type *t) {
  struct open_scope *o = c->open;
  scope *s = o->scope;
  const uint32_t name = pm_value_of(c->g, v)->name, n = (uint32_t)pm_type_size(t);
  const char *text = name ? c->g->strings.at[name] : "semaphore";
  if (s->n_sems == o->sem_cap) {
    s->sems =
        pm_vec_grow(&c->m->arena, s->sems, s->n_sems, &o->sem_cap, sizeof *s->sems, s->n_sems + 1);
  }
  c->alloc[v] = c->m->n_block_semaphores;
  s->sems[s->n_sems++] = (struct semaphore_alloc){pm_strdup(&c->m->arena, text, strlen(text)),
                                                  c->m->n_block_semaphores, n};
  c->m->n_block_semaphores += n;
}

void pm_vm_encode_alloc(compiler *c, pm_opid op, const handler *h) {
  const pm_op *o = pm_get(c->g, op);
  const pm_type *t = pm_typeof(c->g, o->out);
  if (t->kind == PM_SEMAPHORE && t->space == PM_SMEM) {
    alloc_semaphore(c, o->out, t);
  } else if (t->kind == PM_SEMAPHORE) { /* of the launch */
    const int64_t first = *pm_attr(c->g, op, PM_ATTR_N), end = first + pm_type_size(t);
    c->alloc[o->out] = (uint32_t)first;
    c->m->n_semaphores = (uint32_t)pm_max(c->m->n_semaphores, end);
  } else if (t->kind == PM_REF && t->space == PM_SMEM) {
    alloc_smem(c, op, o->out, t);
  } else if (t->kind == PM_REF && t->space == PM_TMEM) {
    alloc_tmem(c, op, o->out);
  } else if (t->kind == PM_BARRIER) {
    alloc_barrier(c, op, o->out, t);
  } else {
    uint32_t init = o->n_in ? use(c, full(c, pm_in(c->g, op, 0))) : 0;
    uint32_t slot = use(c, define(c, o->out));
    pm_vec_push(c->temp, &c->accs, slot);
    instr *i = emit(c, op, h->exec);
    i->dst = slot;
    i->a = init;
    i->n = (uint32_t)bytes_of(t);
  }
}

static scope *open_scope(compiler *c, bool collective) {
  struct open_scope *o = PM_NEW(c->temp, struct open_scope, 1);
  scope *s = PM_NEW(&c->m->arena, scope, 1);
  s->collective = collective;
  s->index = c->scopes.n;
  pm_vec_push(&c->m->arena, &c->scopes, s);
  *o = (struct open_scope){.outer = c->open, .scope = s, .first_acc = c->accs.n};
  c->open = o;
  return s;
}

static void close_scope(compiler *c) {
  struct open_scope *o = c->open;
  scope *s = o->scope;
  s->accs = PM_NEW(&c->m->arena, uint32_t, c->accs.n - o->first_acc + 1);
  while (c->accs.n > o->first_acc) use_outside(c, &s->accs[s->n_accs++], c->accs.at[--c->accs.n]);
  c->open = o->outer;
}

static void encode_block(compiler *c, pm_blk b) {
  const pm_block *block = &c->g->blocks.at[b];
  for (uint32_t k = 0; k < block->ops.n && !c->status; k++) {
    pm_opid op = block->ops.at[k];
    const handler *h = c->known->ops[pm_get(c->g, op)->code];
    h->encode(c, op, h);
  }
}

void pm_vm_encode_scope(compiler *c, pm_opid op, const handler *h) {
  scope *s = open_scope(c, *pm_attr(c->g, op, PM_ATTR_COLLECTIVE) != 0);
  emit(c, op, h->exec)->scope = s;
  pm_blk region = pm_region(c->g, op, 0);
  encode_block(c, region);
  if (c->status) return;
  const pm_op *p = pm_get(c->g, op);
  pm_opid yield = pm_terminator(c->g, region);
  for (uint32_t k = 0; k < p->n_out; k++) c->slot[p->out + k] = full(c, pm_in(c->g, yield, k));
  close_scope(c);
  emit(c, op, c->known->leave)->scope = s;
}

/* ---- control ------------------------------------------------------------------------------ */

/* dst[k] = storage of value k of src, as if all at once. */
static void emit_moves(compiler *c, pm_opid op, const uint32_t *dst, const uint32_t *src,
                       const size_t *bytes, uint32_t n) {
  if (!n) return;
  moves *first = pm_alloc(&c->m->arena, sizeof *first + n * sizeof first->at[0]);
  moves *second = pm_alloc(&c->m->arena, sizeof *second + n * sizeof second->at[0]);
  for (uint32_t k = 0; k < n; k++) {
    if (dst[k] == src[k]) continue;
    uint32_t from = src[k];
    for (uint32_t j = 0; j < n; j++) {
      if (j == k || dst[j] != src[k] || dst[j] == src[j]) continue;
      from = new_storage(c, bytes[k]);
      struct move *save = &first->at[first->n++];
      save->bytes = (uint32_t)bytes[k];
      use_outside(c, &save->dst, from);
      use_outside(c, &save->src, src[k]);
      break;
    }
    struct move *move = &second->at[second->n++];
    move->bytes = (uint32_t)bytes[k];
    use_outside(c, &move->dst, dst[k]);
    use_outside(c, &move->src, from);
  }
  if (first->n) {
    emit(c, op, c->known->move)->moves = first;
    for (uint32_t k = 0; k < second->n; k++) use(c, second->at[k].src), use(c, second->at[k].dst);
  }
  if (second->n) emit(c, op, c->known->move)->moves = second;
}

/* Move n operands of `from`, beginning with the first-th, into storages. */
static void move_operands(compiler *c, pm_opid from, uint32_t first, const uint32_t *dst,
                          uint32_t n) {
  uint32_t *src = PM_NEW(c->temp, uint32_t, n + 1);
  size_t *bytes = PM_NEW(c->temp, size_t, n + 1);
  for (uint32_t k = 0; k < n; k++) {
    pm_val v = pm_in(c->g, from, first + k);
    if (pm_typeof(c->g, v)->kind != PM_ARRAY) {
      fail(c, from, PM_E_NOT_IMPLEMENTED,
           "a ref is carried through control flow; use it from the enclosing scope instead");
      return;
    }
    src[k] = full(c, v);
    bytes[k] = bytes_of(pm_typeof(c->g, v));
  }
  emit_moves(c, from, dst, src, bytes, n);
}

static void loop_done(compiler *c, uint32_t start) {
  span s = {start, c->code.n - 1};
  pm_vec_push(c->temp, &c->loops, s);
}

void pm_vm_encode_kernels(compiler *c, pm_opid op, const handler *h) {
  c->m->overlaps_kernels = true;
  pm_vm_encode_plain(c, op, h);
}

void pm_vm_encode_warp_map(compiler *c, pm_opid op, const handler *h) {
  const uint32_t fork = c->code.n;
  c->m->has_warps = true;
  emit(c, op, h->exec);
  encode_block(c, pm_region(c->g, op, 0));
  if (c->status) return;
  emit(c, op, c->known->warp_end);
  c->code.at[fork].to = c->code.n;
}

void pm_vm_encode_for(compiler *c, pm_opid op, const handler *h) {
  const pm_op *o = pm_get(c->g, op);
  pm_blk body = pm_region(c->g, op, 0);
  const pm_block *b = &c->g->blocks.at[body];
  uint32_t n = o->n_in - 2, *carry = PM_NEW(c->temp, uint32_t, n + 2);
  uint32_t high = full(c, pm_in(c->g, op, 1));
  for (uint32_t k = 0; k <= n; k++) carry[k] = define(c, b->arg + k);
  move_operands(c, op, 0, carry, 1);
  move_operands(c, op, 2, carry + 1, n);
  uint32_t start = c->code.n;
  use(c, carry[0]), use(c, high);
  instr *i = emit(c, op, h->exec);
  i->a = carry[0];
  i->b = high;
  encode_block(c, body);
  if (c->status) return;
  move_operands(c, pm_terminator(c->g, body), 0, carry + 1, n);
  use(c, carry[0]);
  i = emit(c, op, c->known->next);
  i->a = carry[0];
  i->to = start;
  loop_done(c, start);
  c->code.at[start].to = c->code.n;
  for (uint32_t k = 0; k < o->n_out; k++) c->slot[pm_get(c->g, op)->out + k] = carry[k + 1];
}

void pm_vm_encode_while(compiler *c, pm_opid op, const handler *h) {
  const pm_op *o = pm_get(c->g, op);
  uint32_t n = o->n_in, *carry = PM_NEW(c->temp, uint32_t, n + 1);
  pm_blk test = pm_region(c->g, op, 0), body = pm_region(c->g, op, 1);
  for (uint32_t k = 0; k < n; k++) {
    carry[k] = define(c, c->g->blocks.at[test].arg + k);
    c->slot[c->g->blocks.at[body].arg + k] = carry[k];
  }
  move_operands(c, op, 0, carry, n);
  uint32_t start = c->code.n;
  for (uint32_t k = 0; k < n; k++) use(c, carry[k]);
  encode_block(c, test);
  if (c->status) return;
  uint32_t pred = use(c, full(c, pm_in(c->g, pm_terminator(c->g, test), 0))), branch = c->code.n;
  emit(c, op, h->exec)->a = pred;
  encode_block(c, body);
  if (c->status) return;
  move_operands(c, pm_terminator(c->g, body), 0, carry, n);
  emit_jump(c, op, start);
  loop_done(c, start);
  c->code.at[branch].to = c->code.n;
  for (uint32_t k = 0; k < o->n_out; k++) c->slot[pm_get(c->g, op)->out + k] = carry[k];
}

/* One region of an IF or SWITCH, its yields moved to the op's results. */
static void encode_branch(compiler *c, pm_opid op, uint32_t k, const uint32_t *results) {
  pm_blk region = pm_region(c->g, op, k);
  encode_block(c, region);
  if (c->status) return;
  move_operands(c, pm_terminator(c->g, region), 0, results, pm_get(c->g, op)->n_out);
}

static uint32_t *define_results(compiler *c, pm_opid op) {
  const pm_op *o = pm_get(c->g, op);
  uint32_t *results = PM_NEW(c->temp, uint32_t, o->n_out + 1);
  for (uint32_t k = 0; k < o->n_out; k++) results[k] = define(c, o->out + k);
  return results;
}

void pm_vm_encode_if(compiler *c, pm_opid op, const handler *h) {
  uint32_t pred = use(c, full(c, pm_in(c->g, op, 0)));
  uint32_t *results = define_results(c, op), branch = c->code.n;
  emit(c, op, h->exec)->a = pred;
  encode_branch(c, op, 0, results);
  if (c->status) return;
  uint32_t over = c->code.n;
  emit_jump(c, op, 0);
  c->code.at[branch].to = c->code.n;
  encode_branch(c, op, 1, results);
  c->code.at[over].to = c->code.n;
}

void pm_vm_encode_switch(compiler *c, pm_opid op, const handler *h) {
  uint32_t n = pm_get(c->g, op)->n_regions, index = use(c, full(c, pm_in(c->g, op, 0)));
  uint32_t *targets = PM_NEW(&c->m->arena, uint32_t, n), *jumps = PM_NEW(c->temp, uint32_t, n);
  uint32_t *results = define_results(c, op);
  instr *i = emit(c, op, h->exec);
  i->a = index;
  i->n = n;
  i->targets = targets;
  for (uint32_t k = 0; k < n && !c->status; k++) {
    targets[k] = c->code.n;
    encode_branch(c, op, k, results);
    jumps[k] = c->code.n;
    emit_jump(c, op, 0);
  }
  for (uint32_t k = 0; k < n && !c->status; k++) c->code.at[jumps[k]].to = c->code.n;
}

/* ---- the whole ---------------------------------------------------------------------------- */

void pm_vm_encode_all(compiler *c) {
  const uint32_t n = c->g->values.n + 1;
  c->slot = PM_NEW(c->temp, uint32_t, n);
  c->splat = PM_NEW(c->temp, uint32_t, n);
  c->alloc = PM_NEW(c->temp, uint32_t, n);
  c->apart = PM_NEW(c->temp, uint32_t, n);
  c->shared = PM_NEW(c->temp, bool, n);
  pm_walk((pm_graph *)c->g, 1, note_shared, c);
  c->m->image_bytes = 64; /* offset 0 is no slot */
  new_storage(c, 0);
  scope *whole = open_scope(c, true);
  c->whole = c->open;
  encode_block(c, 1);
  if (c->status) return;
  close_scope(c);
  emit(c, 0, c->known->end)->scope = whole;
}
