/* Ops made by name: effect("barrier_wait", operands, **attributes) reads the rest from the op table
 * (ops.def, attrs.def, enums.def), so that a new op needs no code here. */
#include "../ir/access.h"
#include "../ir/rules.h"
#include "trace.h"

#include <stdio.h>

/* ---- operands and attributes --------------------------------------------------------------- */

void pmpy_op_call_end(pmpy_op_call *c) {
  PyMem_Free(c->in);
  PyMem_Free(c->weak);
}

/* The operand letter of ops.def for operand k. */
static char letter_of(pm_opcode code, uint32_t k) {
  const uint32_t n = pm_op_lookups[code].n_operands;
  const bool known = n && (k < n || pm_operand_of(code, k)->repeated);
  return known ? pm_operand_of(code, k)->letter : 'v';
}

static pm_val operand(pmpy_trace *t, pm_opcode code, char letter, PyObject *o, uint8_t *weak) {
  if (PMPY_IS_REF(o)) {
    pmpy_traced *x = (pmpy_traced *)o;
    *weak = 0;
    return pmpy_check_open(t, x) ? 0 : x->val;
  }
  pmpy_arg x;
  if (pmpy_arg_need(t, pm_op_name(code), o, &x)) return 0;
  *weak = x.weak;
  const bool index = letter == 'i' || letter == 't';
  bool cast = index || (letter == 'p' && !x.val);
  if (index && !pm_is_int(x.type.dtype)) cast = false; /* the type rule complains */
  return pmpy_arg_as(t, &x, cast ? (index ? PM_I32 : PM_BOOL) : x.type.dtype);
}

int pmpy_operands(pmpy_trace *t, pmpy_op_call *c, PyObject *seq) {
  PyObject *fast = PySequence_Fast(seq, "operands must be a sequence");
  if (!fast) return -1;
  Py_ssize_t n = PySequence_Fast_GET_SIZE(fast);
  c->in = PyMem_Malloc(sizeof *c->in * (size_t)(n + 1));
  c->weak = PyMem_Malloc((size_t)(n + 1));
  int rc = c->in && c->weak ? 0 : -1;
  if (rc) PyErr_NoMemory();
  for (Py_ssize_t k = 0; k < n && !rc; k++) {
    PyObject *item = PySequence_Fast_GET_ITEM(fast, k);
    if (item == Py_None) continue; /* an optional operand that is not given */
    char letter = letter_of(c->code, c->n_in);
    c->in[c->n_in] = operand(t, c->code, letter, item, &c->weak[c->n_in]);
    if (!c->in[c->n_in++]) rc = -1;
  }
  Py_DECREF(fast);
  return rc;
}

int pmpy_enum_value(pm_attr_id id, const char *text, int64_t *out) {
  const pm_enum kind = pm_attr_forms[id] - PM_FORM_ENUM_AXIS;
  const char *name;
  for (*out = 0; (name = pm_enum_text(kind, *out)); ++*out) {
    if (!strcmp(name, text)) return 0;
  }
  pmpy_fail(PM_E_VALUE, "%s: unknown value '%s'", pm_attr_text[id], text);
  return -1;
}

static int attribute(pmpy_trace *t, pmpy_op_call *c, const char *name, PyObject *value) {
  const pm_op_info *info = &pm_ops[c->code];
  int k = 0;
  while (k < info->n_attrs && strcmp(pm_attr_text[info->attrs[k]], name)) k++;
  if (k == info->n_attrs) {
    pmpy_fail(PM_E_TYPE, "%s has no attribute '%s'", info->text, name);
    return -1;
  }
  pm_attr_arg *a = &c->attrs[c->n_attrs];
  *a = (pm_attr_arg){.id = info->attrs[k]};
  const pm_attr_form form = pm_attr_forms[a->id];
  const bool named = form >= PM_FORM_ENUM_AXIS && PyUnicode_Check(value);
  if (form == PM_FORM_LAYOUT || form == PM_FORM_BITS) {
    pmpy_fail(PM_E_NOT_IMPLEMENTED, "%s: attribute '%s' cannot be given here", info->text, name);
    return -1;
  }
  if (form == PM_FORM_LIST) {
    int n = pmpy_ints(value, name, c->list[c->n_attrs], 2 * PM_MAX_RANK);
    if (n < 0) return -1;
    a->list = c->list[c->n_attrs];
    a->n = (uint32_t)n;
  } else if (form == PM_FORM_STR || named) {
    const char *s = PyUnicode_AsUTF8(value);
    if (!s || (named && pmpy_enum_value(a->id, s, &a->i))) return -1;
    if (!named) a->i = pmpy_intern(t->g, s);
  } else if (pmpy_ints(value, name, &a->i, 1) != 1) {
    if (!PyErr_Occurred()) pmpy_fail(PM_E_TYPE, "%s: %s must be an int", info->text, name);
    return -1;
  }
  c->n_attrs++;
  return 0;
}

int pmpy_op_call_begin(pmpy_trace *t, pmpy_op_call *c, PyObject *const *args, Py_ssize_t n,
                       Py_ssize_t expected, PyObject *kwnames) {
  memset(c, 0, offsetof(pmpy_op_call, attrs));
  Py_ssize_t size;
  const char *name =
      n == expected && PyUnicode_Check(args[0]) ? PyUnicode_AsUTF8AndSize(args[0], &size) : NULL;
  if (!name) {
    if (!PyErr_Occurred()) pmpy_fail(PM_E_TYPE, "expected the name of an op and its operands");
    return -1;
  }
  c->code = (pm_opcode)pm_op_find(name, (size_t)size);
  if (!c->code) {
    pmpy_fail(PM_E_VALUE, "there is no op '%s'", name);
    return -1;
  }
  if (pmpy_operands(t, c, args[1])) return -1;
  for (Py_ssize_t k = 0; kwnames && k < PyTuple_GET_SIZE(kwnames); k++) {
    const char *key = PyUnicode_AsUTF8(PyTuple_GET_ITEM(kwnames, k));
    if (!key || attribute(t, c, key, args[n + k])) return -1;
  }
  return 0;
}

static PyObject *effect(PyObject *module, PyObject *const *args, Py_ssize_t n, PyObject *kwnames) {
  (void)module;
  const char *name = n && PyUnicode_Check(args[0]) ? PyUnicode_AsUTF8(args[0]) : NULL;
  pmpy_trace *t = pmpy_begin(name ? name : "effect", NULL);
  pmpy_op_call c;
  if (!t) return NULL;
  bool ok = !pmpy_op_call_begin(t, &c, args, n, 2, kwnames);
  if (ok && (pm_ops[c.code].out > 1 || pm_ops[c.code].regions)) {
    pmpy_fail(PM_E_TYPE, "%s has results or regions; effect() makes ops without",
              pm_op_name(c.code));
    ok = false;
  }
  const pm_val v = ok ? pmpy_emit(t, c.code, c.in, c.n_in, NULL, c.attrs, c.n_attrs) : 0;
  const bool out = ok && pm_ops[c.code].out;
  pmpy_op_call_end(&c);
  if (!v) return NULL;
  if (out) return pmpy_traced_new(t, v, false);
  Py_RETURN_NONE;
}

static PyObject *axis_index(PyObject *module, PyObject *const *args, Py_ssize_t n) {
  (void)module;
  pmpy_trace *t = pmpy_begin("axis_index", NULL);
  if (!t) return NULL;
  const char *kind = n == 2 && PyUnicode_Check(args[0]) ? PyUnicode_AsUTF8(args[0]) : NULL;
  if (!kind) {
    if (PyErr_Occurred()) return NULL;
    return pmpy_fail(PM_E_TYPE, "axis_index: expected a kind of axis and its number");
  }
  pm_attr_arg attrs[2] = {{.id = PM_ATTR_AXIS}, {.id = PM_ATTR_DIM}};
  if (pmpy_enum_value(PM_ATTR_AXIS, kind, &attrs[0].i)) return NULL;
  if (pmpy_ints(args[1], "axis_index", &attrs[1].i, 1) != 1) return NULL;
  pm_type type = pm_scalar_type(PM_I32);
  pm_val v = pmpy_emit(t, PM_OP_AXIS, NULL, 0, &type, attrs, 2);
  return v ? pmpy_traced_new(t, v, false) : NULL;
}

/* size_value(number) -> Array */
static PyObject *size_value(PyObject *module, PyObject *number) {
  (void)module;
  pm_attr_arg attr = {.id = PM_ATTR_N};
  pmpy_trace *t = pmpy_begin("dim", NULL);
  if (!t || pmpy_ints(number, "size_value", &attr.i, 1) != 1) return NULL;
  pm_type type = pm_scalar_type(PM_I32);
  pm_val v = pmpy_emit(t, PM_OP_SIZE, NULL, 0, &type, &attr, 1);
  return v ? pmpy_traced_new(t, v, true) : NULL;
}

static PyObject *counted(pm_opcode code, PyObject *number) {
  const char *what = pm_op_name(code);
  pmpy_trace *t = pmpy_begin(what, NULL);
  pm_attr_arg attr = {.id = PM_ATTR_N};
  if (!t || pmpy_ints(number, what, &attr.i, 1) != 1) return NULL;
  pm_type type = pm_scalar_type(PM_I32);
  pm_val v = pmpy_emit(t, code, NULL, 0, &type, &attr, 1);
  return v ? pmpy_traced_new(t, v, false) : NULL;
}

static PyObject *next_tile(PyObject *module, PyObject *number) {
  (void)module;
  return counted(PM_OP_NEXT_TILE, number);
}

static PyObject *fetch_tile(PyObject *module, PyObject *const *args, Py_ssize_t n) {
  (void)module;
  pmpy_trace *t = pmpy_begin("fetch_tile", NULL);
  pm_attr_arg attr = {.id = PM_ATTR_N};
  pmpy_arg own;
  pm_val in = 0;
  if (!t || n < 1 || n > 2 || pmpy_ints(args[0], "fetch_tile", &attr.i, 1) != 1) return NULL;
  if (n == 2 &&
      (pmpy_arg_need(t, "fetch_tile", args[1], &own) || !(in = pmpy_arg_as(t, &own, PM_I32)))) {
    return NULL;
  }
  pm_type type = pm_scalar_type(PM_I32);
  pm_val v = pmpy_emit(t, PM_OP_FETCH_TILE, &in, n == 2, &type, &attr, 1);
  return v ? pmpy_traced_new(t, v, false) : NULL;
}

static PyObject *first_tile(PyObject *module, PyObject *unused) {
  (void)module, (void)unused;
  pmpy_trace *t = pmpy_begin("first_tile", NULL);
  pm_type type = pm_scalar_type(PM_I32);
  pm_val v = t ? pmpy_emit(t, PM_OP_FIRST_TILE, NULL, 0, &type, NULL, 0) : 0;
  return v ? pmpy_traced_new(t, v, false) : NULL;
}

/* The enums of enums.def by their names there. */
static PyObject *enum_names(PyObject *module, PyObject *wanted) {
  static const char *const enums[PM_ENUM_COUNT] = {
#define V(name, id, text)
#define PM_ENUM(name, values) [PM_ENUM_##name] = #name,
#include "../ir/enums.def"
#undef PM_ENUM
#undef V
  };
  (void)module;
  for (int f = 0; f < PM_ENUM_COUNT; f++) {
    if (!PyUnicode_Check(wanted) || PyUnicode_CompareWithASCIIString(wanted, enums[f])) continue;
    Py_ssize_t n = 0;
    while (pm_enum_text((pm_enum)f, n)) n++;
    PyObject *out = PyTuple_New(n);
    for (Py_ssize_t k = 0; out && k < n; k++) {
      PyObject *name = PyUnicode_FromString(pm_enum_text((pm_enum)f, k));
      if (name) PyTuple_SET_ITEM(out, k, name);
      else Py_CLEAR(out);
    }
    return out;
  }
  return PyErr_Format(PyExc_ValueError, "enum_names: there is no enum %R", wanted);
}

/* Columns of dtypes.def, by the names of dtypes. */
static PyObject *dtype_table(PyObject *module, PyObject *unused) {
  (void)module, (void)unused;
  PyObject *out = PyDict_New();
  for (int t = 0; out && t < PM_DTYPE_COUNT; t++) {
    const pm_dtype_info *d = &pm_dtypes[t];
    PyObject *row = Py_BuildValue("(is)", d->bits, d->cuda);
    if (!row || PyDict_SetItemString(out, d->text, row)) Py_CLEAR(out);
    Py_XDECREF(row);
  }
  return out;
}

static PyMethodDef functions[] = {
    {"dtype_table", dtype_table, METH_NOARGS,
     "dtype_table() -> {name: (bits in the memory of kernels, type in CUDA C++)}"},
    {"enum_names", enum_names, METH_O,
     "enum_names(name): names of the values of an enum of the graph, in the order of their "
     "numbers; ENGINE, OOB ..."},
    {"effect", (PyCFunction)(void (*)(void))effect, METH_FASTCALL | METH_KEYWORDS,
     "effect(name, operands, **attrs): add an op without regions; its result, or None."},
    {"first_tile", first_tile, METH_NOARGS, "first_tile(): number of this cluster in the launch."},
    {"fetch_tile", (PyCFunction)(void (*)(void))fetch_tile, METH_FASTCALL,
     "fetch_tile(n, own=None): the next number of counter n of the launch, for broadcast_tile or "
     "shuffle_tile; own, where each cluster has a point of its own."},
    {"next_tile", next_tile, METH_O, "next_tile(n): counter n of the launch, plus one each time."},
    {"size_value", size_value, METH_O, "size_value(number) -> Array, a size of the call."},
    {"axis_index", (PyCFunction)(void (*)(void))axis_index, METH_FASTCALL,
     "axis_index(kind, dim) -> Array; kind is grid, cluster or thread."},
    {NULL, NULL, 0, NULL}};

int pmpy_init_ops(PyObject *module) { return PyModule_AddFunctions(module, functions); }
