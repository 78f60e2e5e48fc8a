/* Op: an op with regions, while they are being filled. */
#include "trace.h"

typedef struct region_op {
  PyObject_HEAD pmpy_trace *trace; /* owned */
  pm_opid op;
  uint32_t outer;  /* serial of the region it stands in */
  uint32_t serial; /* of its region that is open, 0: none is */
  uint32_t inside; /* number of that region */
  uint32_t n_in, n_weak;
  bool ended;
  uint8_t *in_weak; /* owned; weakness of operands */
  uint8_t *weak;    /* owned; weakness of results as far as known */
} region_op;

static PyObject *open_op(PyObject *module, PyObject *const *args, Py_ssize_t n, PyObject *kwnames) {
  (void)module;
  pmpy_trace *t = pmpy_begin("open", NULL);
  pmpy_op_call c;
  if (!t) return NULL;
  int64_t n_regions = 0;
  pm_opid op = 0;
  if (!pmpy_op_call_begin(t, &c, args, n, 3, kwnames) &&
      pmpy_ints(args[2], "regions", &n_regions, 1) == 1) {
    if (!pm_ops[c.code].regions || n_regions < 1 || n_regions > UINT16_MAX) {
      pmpy_fail(PM_E_VALUE, "%s: %lld regions or branches; 1 to %d are supported",
                pm_op_name(c.code), (long long)n_regions, UINT16_MAX);
    } else {
      op = pmpy_open(t, c.code, c.in, c.n_in, (uint32_t)n_regions, c.attrs, c.n_attrs);
    }
  }
  region_op *o = op ? PyObject_New(region_op, pmpy.op_type) : NULL;
  if (!o) {
    pmpy_op_call_end(&c);
    return NULL;
  }
  o->trace = (pmpy_trace *)Py_NewRef((PyObject *)t);
  o->op = op;
  o->outer = t->region[t->depth - 1].serial;
  o->serial = o->inside = o->n_weak = 0;
  o->ended = false;
  o->n_in = c.n_in;
  o->in_weak = c.weak;
  o->weak = NULL;
  c.weak = NULL;
  pmpy_op_call_end(&c);
  return (PyObject *)o;
}

static void op_dealloc(PyObject *self) {
  region_op *o = (region_op *)self;
  PyTypeObject *type = Py_TYPE(self);
  PyMem_Free(o->in_weak);
  PyMem_Free(o->weak);
  Py_DECREF(o->trace);
  PyObject_Free(self);
  Py_DECREF(type);
}

/* The op's trace with the user's place, if the op may do `what` now: `inside` one of its regions,
 * or directly where it stands. */
static pmpy_trace *op_begin(region_op *o, const char *what, bool inside) {
  pmpy_trace *t = pmpy_begin(what, NULL);
  if (!t) return NULL;
  uint32_t top = t->region[t->depth - 1].serial;
  if (o->trace != t || o->ended || top != (inside ? o->serial : o->outer)) {
    pmpy_fail(PM_E_RUNTIME, "%s: the op is not the one being filled", what);
    return NULL;
  }
  return t;
}

static pm_opcode op_code(const region_op *o) { return (pm_opcode)pm_get(o->trace->g, o->op)->code; }

/* Weakness of region argument k where the caller says nothing: that of the operand it starts with.
 */
static bool argument_weak(const region_op *o, uint32_t k) {
  pm_opcode code = op_code(o);
  if (code == PM_OP_FOR) return k ? o->in_weak[k + 1] : o->in_weak[0] && o->in_weak[1];
  return code == PM_OP_WHILE && o->in_weak[k];
}

/* List of objects for n consecutive values. `weak` and `names` may be NULL or None or sequences. */
static PyObject *value_list(pmpy_trace *t, const region_op *o, pm_val first, uint32_t n,
                            PyObject *weak, PyObject *names, bool results) {
  PyObject *w = weak && weak != Py_None ? PySequence_Fast(weak, "weak must be a sequence") : NULL;
  PyObject *s =
      names && names != Py_None ? PySequence_Fast(names, "names must be a sequence") : NULL;
  PyObject *list = PyErr_Occurred() ? NULL : PyList_New(n);
  for (uint32_t k = 0; list && k < n; k++) {
    bool is_weak = results ? k < o->n_weak && o->weak[k] : argument_weak(o, k);
    if (w)
      is_weak =
          k < PySequence_Fast_GET_SIZE(w) && PyObject_IsTrue(PySequence_Fast_GET_ITEM(w, k)) == 1;
    pm_dtype d = pm_typeof(t->g, first + k)->dtype;
    PyObject *x = pmpy_traced_new(t, first + k, is_weak && (d == PM_I32 || d == PM_F32));
    if (!x) Py_CLEAR(list);
    else PyList_SET_ITEM(list, k, x);
    PyObject *name = s && k < PySequence_Fast_GET_SIZE(s) ? PySequence_Fast_GET_ITEM(s, k) : NULL;
    const char *text = name && PyUnicode_Check(name) ? PyUnicode_AsUTF8(name) : NULL;
    if (text) pmpy_name(t, first + k, text);
  }
  Py_XDECREF(w);
  Py_XDECREF(s);
  return list;
}

static PyObject *op_enter(PyObject *self, PyObject *args, PyObject *kw) {
  static char *names[] = {"k", "weak", "names", NULL};
  region_op *o = (region_op *)self;
  int k = 0;
  PyObject *weak = NULL, *arg_names = NULL;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "|iOO:enter", names, &k, &weak, &arg_names))
    return NULL;
  pmpy_trace *t = op_begin(o, "enter", false);
  if (!t) return NULL;
  if (k < 0 || k >= pm_get(t->g, o->op)->n_regions) {
    return pmpy_fail(PM_E_VALUE, "enter: there is no region %d", k);
  }
  pm_blk block = pm_region(t->g, o->op, (uint32_t)k);
  if (pmpy_push_region(t, block)) return NULL;
  o->serial = t->region[t->depth - 1].serial;
  o->inside = (uint32_t)k;
  const pm_block *b = &t->g->blocks.at[block];
  return value_list(t, o, b->arg, b->n_args, weak, arg_names, false);
}

/* A result is weak if every yield (and the value it starts with) is. */
static int note_weak(region_op *o, const uint8_t *weak, uint32_t n) {
  pm_opcode code = op_code(o);
  if (code == PM_OP_WHILE && !o->inside) return 0;
  if (!o->weak) {
    o->weak = PyMem_Malloc(n + 1);
    if (!o->weak) {
      PyErr_NoMemory();
      return -1;
    }
    o->n_weak = n;
    uint32_t first = code == PM_OP_FOR ? 2 : 0;
    bool carries = code == PM_OP_FOR || code == PM_OP_WHILE;
    for (uint32_t k = 0; k < n; k++) {
      o->weak[k] = carries ? k + first < o->n_in && o->in_weak[k + first] : 1;
    }
  }
  for (uint32_t k = 0; k < n && k < o->n_weak; k++) o->weak[k] &= weak[k];
  return 0;
}

static PyObject *op_leave(PyObject *self, PyObject *values) {
  region_op *o = (region_op *)self;
  pmpy_trace *t = op_begin(o, "leave", true);
  if (!t) return NULL;
  pmpy_op_call c = {.code = PM_OP_YIELD};
  bool ok = !pmpy_operands(t, &c, values) && !note_weak(o, c.weak, c.n_in) &&
            pmpy_emit(t, PM_OP_YIELD, c.in, c.n_in, NULL, NULL, 0);
  pmpy_op_call_end(&c);
  if (!ok) return NULL;
  t->depth--;
  t->b.block = t->region[t->depth - 1].block;
  o->serial = 0;
  Py_RETURN_NONE;
}

typedef struct close_job {
  pm_builder *b;
  pm_opid op;
} close_job;

static pm_code close_body(void *ctx, pm_err *err) {
  close_job *j = ctx;
  return pm_close(j->b, j->op, err);
}

static PyObject *op_close(PyObject *self, PyObject *args, PyObject *kw) {
  static char *names[] = {"weak", "names", NULL};
  region_op *o = (region_op *)self;
  PyObject *weak = NULL, *result_names = NULL;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "|OO:close", names, &weak, &result_names)) return NULL;
  pmpy_trace *t = op_begin(o, "close", false);
  if (!t) return NULL;
  PMPY_ERR(err);
  if (pm_protect(close_body, &(close_job){&t->b, o->op}, &err)) return pmpy_raise(&err);
  o->ended = true;
  const pm_op *op = pm_get(t->g, o->op);
  return value_list(t, o, op->out, op->n_out, weak, result_names, true);
}

static PyObject *op_abandon(PyObject *self, PyObject *none) {
  region_op *o = (region_op *)self;
  pmpy_trace *t = o->trace;
  (void)none;
  if (!t->graph || o->ended) Py_RETURN_NONE;
  uint32_t depth = t->depth;
  while (depth && t->region[depth - 1].serial != o->outer) depth--;
  pm_op *op = pm_get(t->g, o->op);
  const pm_block *parent = &t->g->blocks.at[op->parent];
  if (!depth || !parent->ops.n || parent->ops.at[parent->ops.n - 1] != o->op) {
    return pmpy_fail(PM_E_RUNTIME, "abandon: other ops came after this one");
  }
  pm_abandon(&t->b, o->op);
  t->depth = depth;
  t->b.block = t->region[depth - 1].block;
  o->ended = true;
  Py_RETURN_NONE;
}

static PyMethodDef op_methods[] = {
    {"enter", (PyCFunction)(void (*)(void))op_enter, METH_VARARGS | METH_KEYWORDS,
     "enter(k=0, weak=None, names=None): go into region k; its arguments."},
    {"leave", op_leave, METH_O, "leave(values): end the region with what it yields."},
    {"close", (PyCFunction)(void (*)(void))op_close, METH_VARARGS | METH_KEYWORDS,
     "close(weak=None, names=None): end the op; its results."},
    {"abandon", op_abandon, METH_NOARGS, "Take the op away again, with all in it."},
    {NULL, NULL, 0, NULL}};

static PyType_Slot op_slots[] = {{Py_tp_dealloc, op_dealloc},
                                 {Py_tp_methods, op_methods},
                                 {Py_tp_doc, "An op with regions that is being filled."},
                                 {0, NULL}};
static PyType_Spec op_spec = {"pallas_mgpu._core.Op", sizeof(region_op), 0,
                              Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, op_slots};

static PyObject *in_loop(PyObject *module, PyObject *none) {
  (void)module, (void)none;
  const pmpy_trace *t = pmpy_begin("in_loop", NULL);
  if (!t) return NULL;
  bool found = false;
  for (pm_blk b = t->b.block; t->g->blocks.at[b].parent && !found;) {
    const pm_op *o = pm_get(t->g, t->g->blocks.at[b].parent);
    found = o->code == PM_OP_FOR || o->code == PM_OP_WHILE;
    b = o->parent;
  }
  return PyBool_FromLong(found);
}

static PyObject *region(PyObject *module, PyObject *none) {
  (void)module, (void)none;
  const pmpy_trace *t = pmpy_begin("region", NULL);
  return t ? PyLong_FromUnsignedLong(t->region[t->depth - 1].serial) : NULL;
}

static PyMethodDef functions[] = {
    {"in_loop", in_loop, METH_NOARGS, "in_loop() -> bool: is the innermost region part of a loop?"},
    {"region", region, METH_NOARGS, "region() -> int: number of the innermost open region."},
    {"open", (PyCFunction)(void (*)(void))open_op, METH_FASTCALL | METH_KEYWORDS,
     "open(name, operands, n_regions, **attrs) -> Op: add an op with regions."},
    {NULL, NULL, 0, NULL}};

int pmpy_init_regions(PyObject *module) {
  pmpy.op_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &op_spec, NULL);
  if (!pmpy.op_type || PyModule_AddType(module, pmpy.op_type)) return -1;
  return PyModule_AddFunctions(module, functions);
}
