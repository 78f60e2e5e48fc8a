/* What is known of traced values: bounds, dependences by data flow, uses. */
#include "trace.h"

enum { MOST = 32 };

/* Graph values of a sequence of Arrays; count, or -1. */
static Py_ssize_t values_of(PyObject *sequence, pm_val out[MOST], const pmpy_trace **trace) {
  PyObject *fast = PySequence_Fast(sequence, "depends: a sequence of arrays is needed");
  if (!fast) return -1;
  Py_ssize_t n = PySequence_Fast_GET_SIZE(fast);
  if (n > MOST) {
    PyErr_Format(PyExc_ValueError, "depends: at most %d values, got %zd", (int)MOST, n);
    n = -1;
  }
  for (Py_ssize_t k = 0; k < n; k++) {
    PyObject *x = PySequence_Fast_GET_ITEM(fast, k);
    if (!PMPY_IS_ARRAY(x)) {
      PyErr_Format(PyExc_TypeError, "depends: %R is not a traced array", x);
      n = -1;
      break;
    }
    out[k] = ((pmpy_traced *)x)->val;
    *trace = ((pmpy_traced *)x)->trace;
  }
  Py_DECREF(fast);
  return n;
}

static PyObject *depends(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t n_args) {
  if (n_args != 2) {
    PyErr_SetString(PyExc_TypeError, "depends(values, on): two sequences are needed");
    return NULL;
  }
  pm_val vals[MOST], on[MOST];
  const pmpy_trace *trace = NULL;
  Py_ssize_t n = values_of(args[0], vals, &trace),
             n_on = n < 0 ? -1 : values_of(args[1], on, &trace);
  if (n_on < 0) return NULL;
  if (!n || !n_on) Py_RETURN_FALSE;
  if (!trace->g) {
    PyErr_SetString(PyExc_RuntimeError, "depends: the trace is finished");
    return NULL;
  }
  return PyBool_FromLong(pm_depends(trace->g, vals, (uint32_t)n, on, (uint32_t)n_on));
}

static PyObject *bounds(PyObject *Py_UNUSED(self), PyObject *x) {
  pmpy_trace *t = pmpy_begin("bounds", NULL);
  pmpy_arg a;
  int64_t lo, hi;
  if (!t || pmpy_arg_need(t, "bounds", x, &a)) return NULL;
  if (!pm_range(t->g, a.val, &lo, &hi)) Py_RETURN_NONE;
  return Py_BuildValue("LL", (long long)lo, (long long)hi);
}

/* Adds the texts of all ops that use v or a view of it. part: v is a part of what was asked for. */
static int add_uses(const pm_graph *g, pm_val v, bool part, PyObject *out) {
  for (pm_opid id = 1; id < g->ops.n; id++) {
    const pm_op *o = pm_get(g, id);
    for (uint32_t k = 0; k < o->n_in; k++) {
      if (pm_in(g, id, k) != v) continue;
      if (pm_makes_view(o->code)) {
        const bool whole = pm_type_size(pm_typeof(g, o->out)) == pm_type_size(pm_typeof(g, v));
        if (add_uses(g, o->out, part || !whole, out)) return -1;
        continue;
      }
      const char *text = o->code == PM_OP_STORE && part ? "part_store" : pm_ops[o->code].text;
      PyObject *name = PyUnicode_FromString(text);
      const int rc = name ? PyList_Append(out, name) : -1;
      Py_XDECREF(name);
      if (rc) return -1;
    }
  }
  return 0;
}

static PyObject *uses(PyObject *Py_UNUSED(self), PyObject *ref) {
  pmpy_trace *t = pmpy_begin("uses", ref);
  PyObject *out = t ? PyList_New(0) : NULL;
  if (out && add_uses(t->g, ((pmpy_traced *)ref)->val, false, out)) Py_CLEAR(out);
  return out;
}

static PyMethodDef functions[] = {
    {"bounds", bounds, METH_O,
     "bounds(x): (least, largest) value of a traced int scalar, or None where none are known."},
    {"depends", (PyCFunction)(void (*)(void))depends, METH_FASTCALL,
     "depends(values, on): does any of the traced values depend on any of the others?"},
    {"uses", uses, METH_O,
     "uses(ref): names of the ops that use it or a view of it; a store to a part: part_store."},
    {NULL, NULL, 0, NULL}};

int pmpy_init_facts(PyObject *module) { return PyModule_AddFunctions(module, functions); }
