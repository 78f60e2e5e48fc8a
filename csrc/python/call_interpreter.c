/* A call on the interpreter: its options, and what it calls while it runs. */
#include "kernel.h"
#include "races.h"
#include "timeline.h"

typedef struct hooks {
  PyObject *progress;      /* borrowed, or NULL */
  PyObject *races;         /* owned: a list, or NULL where nobody looks for them */
  PyObject *params;        /* borrowed: InterpretParams, where a timeline is asked for */
  const pmpy_graph *graph; /* borrowed */
  bool failed;             /* an exception is set */
} hooks;

static void print_line(void *ctx, const char *line) {
  hooks *h = ctx;
  PyGILState_STATE gil = PyGILState_Ensure();
  PyObject *out = PySys_GetObject("stdout"); /* borrowed */
  if (!h->failed && out && out != Py_None)
    h->failed = PyFile_WriteString(line, out) < 0 || PyFile_WriteString("\n", out) < 0;
  PyGILState_Release(gil);
}

static int on_inlined(void *ctx, pm_inline_call *call) {
  hooks *h = ctx;
  PyGILState_STATE gil = PyGILState_Ensure();
  if (!h->failed) h->failed = pmpy_call_inlined(h->graph, call) < 0;
  PyGILState_Release(gil);
  return h->failed;
}

static int on_progress(void *ctx, int64_t done, int64_t total) {
  hooks *h = ctx;
  PyGILState_STATE gil = PyGILState_Ensure();
  if (!h->failed) h->failed = PyErr_CheckSignals() < 0;
  if (!h->failed && h->progress) {
    PyObject *r = PyObject_CallFunction(h->progress, "LL", (long long)done, (long long)total);
    h->failed = !r;
    Py_XDECREF(r);
  }
  PyGILState_Release(gil);
  return h->failed;
}

static void on_race(void *ctx, const pm_race *race) {
  hooks *h = ctx;
  PyGILState_STATE gil = PyGILState_Ensure();
  if (!h->failed) h->failed = pmpy_add_race(h->races, race) < 0;
  PyGILState_Release(gil);
}

static void on_note(void *ctx, const char *what, const char *file, uint32_t line) {
  hooks *h = ctx;
  PyGILState_STATE gil = PyGILState_Ensure();
  if (!h->failed) h->failed = pmpy_add_note(h->races, what, file, line) < 0;
  PyGILState_Release(gil);
}

static void on_timeline(void *ctx, const pm_timeline_event *events, uint32_t n, bool truncated) {
  hooks *h = ctx;
  PyGILState_STATE gil = PyGILState_Ensure();
  if (pmpy_write_timeline(h->params, h->graph->g, events, n, truncated) < 0) h->failed = true;
  PyGILState_Release(gil);
}

int pmpy_attribute_is(PyObject *o, const char *name, const char *text) {
  PyObject *a = PyObject_GetAttrString(o, name);
  if (!a) return PyErr_ExceptionMatches(PyExc_AttributeError) ? PyErr_Clear(), 0 : -1;
  int is = PyUnicode_Check(a) && !PyUnicode_CompareWithASCIIString(a, text);
  Py_DECREF(a);
  return is;
}

/* -1: exception */
static int race_options(PyObject *p, hooks *h, pm_interp_options *o) {
  PyObject *races = PyObject_GetAttrString(p, "detect_races");
  if (!races) PyErr_Clear();
  Py_XDECREF(races);
  if (races != Py_True) return 0;
  if (!(h->races = PyList_New(0))) return -1;
  o->races = true;
  o->race = on_race;
  o->note = on_note;
  o->race_ctx = h;
  o->race_raises = pmpy_attribute_is(p, "on_race", "raise") > 0;
  o->strict = pmpy_attribute_is(p, "mode", "strict") > 0;
  return PyErr_Occurred() ? -1 : 0;
}

static void timeline_options(PyObject *p, hooks *h, pm_interp_options *o) {
  PyObject *path = PyObject_GetAttrString(p, "timeline");
  if (!path) PyErr_Clear();
  if (path && path != Py_None) {
    h->params = p;
    o->timeline = on_timeline;
    o->timeline_ctx = h;
  }
  Py_XDECREF(path);
}

static int interp_options(const pmpy_kernel *k, hooks *h, pm_interp_options *o) {
  pm_interp_defaults(o);
  o->print = print_line;
  o->number = pmpy_format_number;
  o->progress = on_progress;
  o->inlined = on_inlined;
  o->print_ctx = o->progress_ctx = o->inlined_ctx = h;
  h->progress = k->progress;
  PyObject *p = k->interpret;
  if (!p || p == Py_None || PyBool_Check(p)) return 0;
  PyObject *seed = PyObject_GetAttrString(p, "seed");
  if (seed) o->seed = PyLong_AsUnsignedLongLongMask(seed);
  else PyErr_Clear();
  Py_XDECREF(seed);
  PyObject *log = PyObject_GetAttrString(p, "log");
  if (log) o->log = (int)PyLong_AsLong(log);
  else PyErr_Clear();
  Py_XDECREF(log);
  PyObject *skip = PyObject_GetAttrString(p, "skip_floating_point_ops");
  o->skip_floats = skip == Py_True;
  if (!skip) PyErr_Clear();
  Py_XDECREF(skip);
  int oob = pmpy_attribute_is(p, "out_of_bounds_reads", "uninitialized");
  int zero = pmpy_attribute_is(p, "uninitialized_memory", "zero");
  o->oob_raise = !oob;
  o->zero_fill = zero > 0;
  PyObject *seeds = PyObject_GetAttrString(p, "seeds");
  if (seeds) o->seeds = (uint32_t)PyLong_AsUnsignedLong(seeds);
  else PyErr_Clear();
  Py_XDECREF(seeds);
  PyObject *poison = PyObject_GetAttrString(p, "detect_uninitialized");
  o->poison = poison == Py_True;
  if (!poison) PyErr_Clear();
  Py_XDECREF(poison);
  timeline_options(p, h, o);
  return PyErr_Occurred() ? -1 : race_options(p, h, o);
}

typedef PyObject *made_of_call[PMPY_MAX_PARAMS];

/* Its stream, its outputs, and how they are moved; 0 or -1. */
static int begin(pmpy_call *c, pmpy_run *r, PyObject **made, pm_interp_options *options) {
  uint64_t out[PMPY_MAX_PARAMS];
  void *stream = NULL;
  if (c->cuda && (pmpy_call_find_stream(c, c->device, &stream) < 0 ||
                  (c->has_stream && pmpy_order_home(c, stream) < 0)))
    return -1;
  options->fresh_outputs = !c->out_arg;
  if (pmpy_call_outputs(c, stream, made, out) < 0) return -1;
  *r = (pmpy_run){.c = c, .device = c->device, .stream = stream, .options = options};
  pmpy_run_describe(r, out);
  return 0;
}

static bool run(pmpy_call *calls, uint32_t n, pmpy_run *runs, const hooks *h) {
  pm_err err = {0};
  pm_code code;
  Py_BEGIN_ALLOW_THREADS;
  code = n == 1 ? pmpy_run_execute(runs, &err) : pmpy_runs_execute(runs, n, &err);
  Py_END_ALLOW_THREADS;
  if (h->failed) pmpy_add_place(&err);
  else if (code) pmpy_raise(&err);
  const bool failed = h->failed || code;
  return (!h->races || pmpy_finish_races(h->races, calls->k->interpret) == 0) && !failed;
}

PyObject *pmpy_call_interpreter(pmpy_call *c) {
  made_of_call made;
  pmpy_run r;
  pm_interp_options options;
  hooks h = {.graph = c->plan->graph};
  PyObject *result = NULL;
  if (interp_options(c->k, &h, &options) == 0 && begin(c, &r, made, &options) == 0)
    result = run(c, 1, &r, &h) ? pmpy_call_finish(c, made) : pmpy_call_drop(c, made);
  Py_XDECREF(h.races);
  return result;
}

PyObject *pmpy_calls_interpreter(pmpy_call *calls, uint32_t n) {
  made_of_call *made = PyMem_Calloc(n, sizeof *made);
  pmpy_run *runs = PyMem_Calloc(n, sizeof *runs);
  pm_interp_options options;
  hooks h = {.graph = calls->plan->graph};
  PyObject *results = made && runs ? PyList_New(n) : PyErr_NoMemory();
  uint32_t begun = 0;
  bool ok = results && interp_options(calls->k, &h, &options) == 0;
  while (ok && begun < n && (ok = begin(&calls[begun], &runs[begun], made[begun], &options) == 0))
    begun++;
  ok = ok && run(calls, n, runs, &h);
  for (uint32_t d = 0; d < begun; d++) {
    PyObject *x = ok ? pmpy_call_finish(&calls[d], made[d]) : pmpy_call_drop(&calls[d], made[d]);
    if (x) PyList_SET_ITEM(results, d, x);
    ok = ok && x;
  }
  if (!ok) Py_CLEAR(results);
  Py_XDECREF(h.races);
  PyMem_Free(made);
  PyMem_Free(runs);
  return results;
}
