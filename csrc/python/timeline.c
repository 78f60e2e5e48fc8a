/* The events of a timeline as Python objects: a tuple for each, from which pallas_mgpu/_timeline.py
 * makes a trace. */
#include "timeline.h"

static PyObject *text(const char *s) { /* new, or NULL */
  return s ? PyUnicode_DecodeUTF8(s, (Py_ssize_t)strlen(s), "replace") : Py_NewRef(Py_None);
}

static PyObject *dims(const int64_t *at, uint32_t n) {
  PyObject *t = PyTuple_New(n);
  for (uint32_t k = 0; t && k < n; k++) {
    PyObject *x = PyLong_FromLongLong(at[k]);
    if (!x) Py_CLEAR(t);
    else PyTuple_SET_ITEM(t, k, x);
  }
  return t;
}

static PyObject *agent(const pm_timeline_agent *a) {
  return Py_BuildValue("(LIIi)", (long long)a->cluster, a->block, a->thread, a->warp);
}

static PyObject *event(const pm_timeline_event *e) {
  static const char *const kinds[PM_TIME_KINDS] = {
      [PM_TIME_WORK] = "work",         [PM_TIME_WAIT] = "wait",       [PM_TIME_COPY_IN] = "copy in",
      [PM_TIME_COPY_OUT] = "copy out", [PM_TIME_PRODUCT] = "product", [PM_TIME_SCOPE] = "scope",
  };
  return Py_BuildValue("(sNLLNLNINNI)", kinds[e->kind], agent(&e->agent), (long long)e->begin,
                       (long long)e->end, text(e->what), (long long)e->index, text(e->file),
                       e->line, agent(&e->for_agent), text(e->for_file), e->for_line);
}

static PyObject *list_of(const pm_timeline_event *events, uint32_t n) {
  PyObject *list = PyList_New(n);
  for (uint32_t k = 0; list && k < n; k++) {
    PyObject *x = event(&events[k]);
    if (!x) Py_CLEAR(list);
    else PyList_SET_ITEM(list, k, x);
  }
  return list;
}

int pmpy_write_timeline(PyObject *params, const pm_graph *g, const pm_timeline_event *events,
                        uint32_t n, bool truncated) {
  PyObject *type, *value, *traceback; /* of what ended the run, if anything */
  PyErr_Fetch(&type, &value, &traceback);
  PyObject *r = NULL, *hook = pmpy_hook(PMPY_HOOK_TIMELINE);
  PyObject *list = hook ? list_of(events, n) : NULL;
  if (list)
    r = PyObject_CallFunction(hook, "OsNNNOi", params, g->name, dims(g->grid, g->n_grid),
                              dims(g->cluster, g->n_cluster), PyLong_FromLong(PM_TIMELINE_MHZ),
                              list, (int)truncated);
  const int rc = r ? 0 : -1;
  Py_XDECREF(r);
  Py_XDECREF(list);
  if (type) PyErr_Restore(type, value, traceback);
  return rc;
}
