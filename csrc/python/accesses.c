/* What ops touch, for tests: as ir/access.c says, and as the interpreter's memory functions saw it.
 *
 * Both are tuples. The interpreter's are runs of bytes, which are kept as one interval for each ref
 * of an op and way of access. */
#include "accesses.h"
#include "../ir/access.h"

/* ---- by the table --------------------------------------------------------------------------- */

typedef struct listed {
  pm_access a;
  int param; /* argument of the kernel, -1: none */
  int64_t from, to;
} listed;

typedef struct listing {
  pm_graph *g;
  bool physical, summary;
  pm_arena arena;
  PM_VEC(listed) all;
} listing;

static void list_access(listing *l, const pm_access *a) {
  listed x = {.a = *a, .param = -1};
  if (a->where & PM_IN_MEMORY) pm_access_bytes(l->g, a, l->physical, &x.from, &x.to);
  if (a->where == PM_IN_GMEM) x.param = (int)pm_value_of(l->g, pm_view_base(l->g, a->view))->index;
  pm_vec_push(&l->arena, &l->all, x);
}

static void list_op(pm_graph *g, pm_opid op, void *ctx) {
  pm_access a = pm_accesses(op);
  while (pm_next_access(g, &a)) list_access(ctx, &a);
}

static pm_code list_body(void *ctx, pm_err *err) {
  listing *l = ctx;
  (void)err;
  if (!l->summary) {
    pm_walk(l->g, 1, list_op, l);
    return PM_OK;
  }
  const pm_access_list *kernel = pm_accesses_inside(pm_new_summaries(l->g), 0);
  for (uint32_t k = 0; k < kernel->all.n; k++) list_access(l, &kernel->all.at[k]);
  return PM_OK;
}

static PyObject *tuple_of(const pm_graph *g, const listed *x) {
  static const char *const places[] = {"gmem",  "smem",      "acc",    "barrier",
                                       "phase", "semaphore", "counter"};
  static const char *const proxies[] = {"generic", "async", "unknown"};
  static const char *const scopes[] = {"thread", "block", "cluster", "device"};
  static const char *const certainties[] = {"must", "may", "untold"};
  static const char *const completions[] = {"now", "barrier", "group", "commit"};
  const pm_access *a = &x->a;
  return Py_BuildValue("(IsisOOssssLL)", a->op, pm_ops[pm_get(g, a->op)->code].text, x->param,
                       places[__builtin_ctz(a->where)], a->reads ? Py_True : Py_False,
                       a->writes ? Py_True : Py_False, proxies[a->proxy], scopes[a->scope],
                       certainties[a->certainty], completions[a->completion], (long long)x->from,
                       (long long)x->to);
}

PyObject *pmpy_list_accesses(pm_graph *g, bool physical, bool summary) {
  listing l = {.g = g, .physical = physical, .summary = summary};
  pm_err err = {0};
  pm_arena_init(&l.arena);
  PyObject *list = pm_protect(list_body, &l, &err) ? pmpy_raise(&err) : PyList_New(l.all.n);
  for (uint32_t k = 0; list && k < l.all.n; k++) {
    PyObject *x = tuple_of(g, &l.all.at[k]);
    if (!x) Py_CLEAR(list);
    else PyList_SET_ITEM(list, k, x);
  }
  pm_arena_free(&l.arena);
  return list;
}

/* ---- by the interpreter --------------------------------------------------------------------- */

static bool is_same(const pm_touch *a, const pm_touch *b) {
  return a->op == b->op && a->use == b->use && a->reads == b->reads && a->writes == b->writes &&
         a->engine == b->engine;
}

void pmpy_note_touch(void *ctx, const pm_touch *t) {
  pmpy_touches *s = ctx;
  for (uint32_t k = 0; k < s->n; k++) {
    pm_touch *x = &s->at[k];
    if (!is_same(x, t)) continue;
    x->from = pm_min(x->from, t->from);
    x->to = pm_max(x->to, t->to);
    return;
  }
  if (s->n == s->cap) {
    const uint32_t cap = s->cap ? 2 * s->cap : 64;
    pm_touch *at = pm_realloc(s->at, cap * sizeof *at);
    s->no_memory |= !at;
    if (!at) return;
    s->at = at;
    s->cap = cap;
  }
  s->at[s->n++] = *t;
}

int pmpy_add_touches(PyObject *list, const pmpy_touches *s) {
  if (s->no_memory) return PyErr_NoMemory(), -1;
  for (uint32_t k = 0; k < s->n; k++) {
    const pm_touch *t = &s->at[k];
    PyObject *x = Py_BuildValue("(IiOOOLL)", t->op, t->param, t->reads ? Py_True : Py_False,
                                t->writes ? Py_True : Py_False, t->engine ? Py_True : Py_False,
                                (long long)t->from, (long long)t->to);
    const int rc = x ? PyList_Append(list, x) : -1;
    Py_XDECREF(x);
    if (rc) return -1;
  }
  return 0;
}
