/* What the race detector finds, as Python objects: a tuple for each pair of accesses, from which
 * pallas_mgpu/_races.py makes records. */
#include "races.h"
#include "module.h"

/* New, or NULL. */
static PyObject *text(const char *s) {
  return s ? PyUnicode_DecodeUTF8(s, (Py_ssize_t)strlen(s), "replace") : Py_NewRef(Py_None);
}

/* New, or NULL: (touch, ref, index, agent, file, line) */
static PyObject *side(const pm_race_side *s) {
  return Py_BuildValue("(NNNNNI)", text(s->touch), text(s->ref), text(s->index), text(s->agent),
                       text(s->file), s->line);
}

int pmpy_add_note(PyObject *list, const char *what, const char *file, uint32_t line) {
  PyObject *x = Py_BuildValue("(NNI)", text(what), text(file), line);
  const int rc = x ? PyList_Append(list, x) : -1;
  Py_XDECREF(x);
  return rc;
}

int pmpy_add_race(PyObject *list, const pm_race *r) {
  PyObject *x = Py_BuildValue("(NNLLNNNN)", text(r->space), text(r->index), (long long)r->from,
                              (long long)r->to, text(r->hint), text(r->text), side(&r->first),
                              side(&r->second));
  const int rc = x ? PyList_Append(list, x) : -1;
  Py_XDECREF(x);
  return rc;
}

int pmpy_finish_races(PyObject *list, PyObject *params) {
  PyObject *type, *value, *traceback; /* of what ended the run, if anything */
  PyErr_Fetch(&type, &value, &traceback);
  PyObject *hook = pmpy_hook(PMPY_HOOK_RACES);
  PyObject *r = hook ? PyObject_CallFunctionObjArgs(hook, list, params, NULL) : NULL;
  const int rc = r ? 0 : -1;
  Py_XDECREF(r);
  if (type) PyErr_Restore(type, value, traceback);
  return rc;
}
