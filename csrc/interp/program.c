/* The program of a kernel: the code of its ops (compile.c) on a frame that holds all values.
 *
 * Scalars and constants get bytes of their own, arrays are packed first-fit by the ranges of
 * instructions in which they are live, and numbers of storages become byte offsets. */
#include "compile.h"

/* ---- frame -------------------------------------------------------------------------------- */

static void extend_ranges(compiler *c) {
  for (uint32_t k = 0; k < c->uses.n; k++) {
    storage *s = &c->storages.at[c->uses.at[k].storage];
    uint32_t at = c->uses.at[k].at, end = at;
    for (uint32_t l = 0; l < c->loops.n; l++) {
      bool inside = c->loops.at[l].start <= at && at <= c->loops.at[l].end;
      if (inside && s->start < c->loops.at[l].start && end < c->loops.at[l].end) {
        end = c->loops.at[l].end;
      }
    }
    if (end > s->end) s->end = end;
  }
}

/* Storages are in the order of their starts. `live` is ordered by offset. */
static size_t pack_arrays(compiler *c, size_t base) {
  uint32_t *live = PM_NEW(c->temp, uint32_t, c->storages.n), n = 0;
  size_t top = base;
  for (uint32_t k = 1; k < c->storages.n; k++) {
    storage *s = &c->storages.at[k];
    if (s->fixed) continue;
    uint32_t kept = 0;
    for (uint32_t j = 0; j < n; j++) {
      if (c->storages.at[live[j]].end >= s->start) live[kept++] = live[j];
    }
    n = kept;
    size_t at = base, need = (size_t)pm_round_up((int64_t)s->bytes, 64);
    uint32_t j = 0;
    for (; j < n; j++) {
      const storage *o = &c->storages.at[live[j]];
      if (at + need <= o->offset) break;
      at = o->offset + (size_t)pm_round_up((int64_t)o->bytes, 64);
    }
    memmove(live + j + 1, live + j, (n - j) * sizeof *live);
    live[j] = k;
    n++;
    s->offset = at;
    if (at + need > top) top = at + need;
  }
  return top;
}

static void fill_image(compiler *c) {
  c->m->image = pm_alloc(&c->m->arena, c->m->image_bytes);
  for (uint32_t k = 0; k < c->constants.n; k++) {
    const constant *x = &c->constants.at[k];
    char *at = c->m->image + c->storages.at[x->storage].offset;
    uint8_t bytes = pm_dtypes[x->dtype].bytes;
    for (int64_t e = 0; e < x->n; e++) {
      pm_scalar v = x->value;
      if (x->size) {
        int64_t index = e / x->inner % x->size;
        if (pm_is_float(x->dtype)) {
          v.f = (double)index;
        } else {
          v.i = index;
        }
      }
      pm_store_scalar(x->dtype, at + e * bytes, v);
    }
  }
}

static size_t bytes_of(const pm_type *t) {
  return (size_t)pm_type_size(t) * pm_dtypes[t->dtype].bytes;
}

/* What an instruction makes of memory that was never written. */
static poison_fn poison_of(const compiler *c, const instr *i) {
  const handler *h = c->known->ops[pm_get(c->g, i->op)->code];
  if (i->exec == c->known->move || i->exec == pm_vm_strided) return pm_poison_rule_moves;
  if (i->exec != h->exec) return NULL; /* ends of regions, jumps */
  if (h->poison) return h->poison;
  return i->dst ? pm_poison_rule_defined : NULL;
}

/* Before slots get their places. */
static void note_skipped(compiler *c) {
  for (uint32_t k = 0; k < c->code.n; k++) {
    instr *i = &c->code.at[k];
    const pm_val out = i->op ? pm_get(c->g, i->op)->out : 0;
    i->poison = i->op ? poison_of(c, i) : NULL;
    i->skip = i->op ? (uint8_t)pm_vm_skips(c->g, i->op) : SKIP_NOTHING;
    if (!i->skip || !i->dst || i->dst != c->slot[out]) {
      i->skip = SKIP_NOTHING;
      continue;
    }
    i->skip_dtype = pm_typeof(c->g, out)->dtype;
    i->skip_bytes = (uint32_t)bytes_of(pm_typeof(c->g, out));
  }
}

static void assign_frame(compiler *c) {
  extend_ranges(c);
  size_t top = (size_t)pm_round_up((int64_t)c->m->image_bytes, 64);
  for (uint32_t k = 1; k < c->storages.n; k++) {
    storage *s = &c->storages.at[k];
    if (!s->fixed || s->image) continue;
    s->offset = top;
    top += 8;
  }
  top = pack_arrays(c, (size_t)pm_round_up((int64_t)top, 64));
  if (top > UINT32_MAX) {
    c->status = pm_fail(c->err, PM_E_MEMORY,
                        "the arrays of one thread need more than 4 GiB in the interpreter");
    return;
  }
  c->m->frame_bytes = top;
  for (uint32_t k = 0; k < c->code.n; k++) {
    instr *i = &c->code.at[k];
    uint32_t *slots[] = {&i->dst, &i->a, &i->b, &i->c};
    for (uint32_t j = 0; j < 4; j++) *slots[j] = (uint32_t)c->storages.at[*slots[j]].offset;
  }
  for (uint32_t k = 0; k < c->fixups.n; k++) {
    *c->fixups.at[k] = (uint32_t)c->storages.at[*c->fixups.at[k]].offset;
  }
  fill_image(c);
}

/* ---- the whole ---------------------------------------------------------------------------- */

static void copy_places(compiler *c) {
  const pm_graph *g = c->g;
  c->files = PM_NEW(c->temp, const char *, g->strings.n + 1);
  c->m->places = PM_NEW(&c->m->arena, place, g->ops.n + 1);
  for (uint32_t k = 1; k < g->ops.n; k++) {
    uint32_t file = g->ops.at[k].file;
    if (file && !c->files[file]) {
      c->files[file] = pm_strdup(&c->m->arena, g->strings.at[file], strlen(g->strings.at[file]));
    }
    const uint16_t code = g->ops.at[k].code;
    const char *what = pm_op_name(code);
    if (pm_has_attr(g, k, PM_ATTR_ENDS)) { /* a scope with a name */
      what = g->strings.at[*pm_attr(g, k, PM_ATTR_FORMAT)];
      what = pm_strdup(&c->m->arena, what, strlen(what));
    }
    c->m->places[k] =
        (place){file ? c->files[file] : NULL, g->ops.at[k].line, pm_time_cost(g, k), what};
  }
}

static void describe_arg(compiler *c, uint32_t k) {
  const pm_graph *g = c->g;
  const pm_val v = g->blocks.at[1].arg + k;
  const pm_type *t = pm_typeof(g, v);
  const uint32_t name = pm_value_of(g, v)->name;
  const bool output = k >= g->n_operands;
  arg *a = &c->m->args[k];
  a->name = name ? pm_strdup(&c->m->arena, g->strings.at[name], strlen(g->strings.at[name]))
                 : pm_printf(&c->m->arena, output ? "output %u" : "operand %u",
                             output ? k - g->n_operands : k);
  a->bytes = bytes_of(t);
  a->dtype = t->dtype;
  a->item = pm_dtypes[t->dtype].bytes;
  a->rank = t->rank;
  memcpy(a->dim, t->dim, sizeof a->dim);
  a->fresh = output && !(g->alias && g->alias[k - g->n_operands] >= 0);
}

/* Blocks that run at once: as many as memory allows, but not fewer than a GPU runs, one on each
 * multiprocessor. */
enum { MOST_BLOCKS = 1024, MOST_MEMORY = 1 << 28, SOME_MEMORY = 1 << 26 };

static pm_code compile(void *ctx, pm_err *err) {
  compiler *c = ctx;
  const pm_graph *g = c->g;
  pm_machine *m = c->m;
  c->err = err;
  m->name = pm_strdup(&m->arena, g->name, strlen(g->name));
  m->n_grid = g->n_grid;
  m->n_cluster = g->n_cluster;
  m->n_threads = g->n_threads ? g->n_threads : 1;
  memcpy(m->grid, g->grid, sizeof m->grid);
  memcpy(m->cluster, g->cluster, sizeof m->cluster);
  memcpy(m->mesh, g->mesh, sizeof m->mesh);
  m->n_mesh = g->n_mesh;
  m->n_devices = (uint32_t)pm_n_devices(g);
  m->meets_blocks = m->n_devices > 1;
  m->n_blocks = 1;
  m->grid_size = pm_grid_size(g);
  m->shares_grid = pm_shares_grid(g);
  m->sms = (uint32_t)g->target->sms;
  m->smem_bytes = (size_t)g->scratch_offset; /* the end of all allocations */
  m->profile_words = g->profile_words;
  m->profile_warps = g->profile_warps;
  m->profile_param = g->n_operands + g->profile_output;
  for (uint32_t k = 0; k < g->n_cluster; k++) m->n_blocks *= (uint32_t)g->cluster[k];
  m->n_args = g->n_operands + g->n_outputs;
  m->n_buffers = m->n_args * m->n_devices;
  m->args = PM_NEW(&m->arena, arg, m->n_args);
  for (uint32_t k = 0; k < m->n_args; k++) {
    describe_arg(c, k);
  }
  if (g->profile_words) m->args[m->profile_param].written = true;
  copy_places(c);
  pm_vm_encode_all(c);
  if (c->status) return c->status;
  note_skipped(c);
  assign_frame(c);
  if (c->status) return c->status;
  m->code = PM_NEW(&m->arena, instr, c->code.n);
  memcpy(m->code, c->code.at, c->code.n * sizeof *m->code);
  m->scopes = c->scopes.at;
  m->n_scopes = c->scopes.n;
  m->bars = c->bars.at;
  m->n_bars = c->bars.n;
  m->n_barriers = c->n_barriers;
  m->pair_ops = c->pair_ops.at;
  m->n_pairs = c->pair_ops.n;
  m->tmem_columns = g->tmem_columns;
  const size_t each =
      m->smem_bytes + PM_TMEM_LANES * 4 * (size_t)m->tmem_columns + m->n_threads * m->frame_bytes;
  const int64_t sms = c->g->target->sms;
  const int64_t room = m->meets_blocks ? pm_min(MOST_BLOCKS, pm_max(sms, MOST_MEMORY / each))
                                       : pm_min(sms, SOME_MEMORY / each);
  m->room = (uint32_t)pm_min(m->grid_size, pm_max(1, room / m->n_blocks));
  return PM_OK;
}

pm_code pm_interp_compile(const pm_graph *g, pm_machine **out, pm_err *err) {
  pm_machine *m = pm_malloc(sizeof *m);
  if (!m) return pm_fail(err, PM_E_MEMORY, "no memory for the interpreter");
  memset(m, 0, sizeof *m);
  pm_arena_init(&m->arena);
  pm_arena temp;
  pm_arena_init(&temp);
  compiler c = {.g = g, .known = &pm_vm_handlers, .m = m, .temp = &temp};
  pm_code code = pm_protect(compile, &c, err);
  pm_arena_free(&temp);
  if (code) {
    pm_interp_free(m);
    return code;
  }
  *out = m;
  return PM_OK;
}
