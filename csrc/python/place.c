/* The place in the user's source: of the ops of a trace, of errors, and names that stand there.
 *
 * The user's place is the innermost frame whose file is not of the package; the ready kernels of
 * ops/ and the demo count as user code, since their lines are worth showing. A trace remembers the
 * files of a few code objects, because looking at their names takes longer than adding an op.
 *
 * Names: when a trace is finished, consecutive ops of one source line form a run. If the line reads
 * `name = ...`, the last result of the run gets that name. If it reads `a, b = ...`, so do the
 * results of the last op if there are as many, else those of the run that no op of it uses, if
 * there are as many. Ops in regions of others of the run (of a lambda) do not count. What a loop
 * carries is named as its results are. */
#include "trace.h"

#include <stdio.h>
#include <stdlib.h>

static char package_dir[4096]; /* with a slash at its end */
static size_t package_len;

/* Where the package lies. */
int pmpy_init_place(PyObject *module) {
  PyObject *file = PyObject_GetAttrString(module, "__file__");
  const char *s = file ? PyUnicode_AsUTF8(file) : NULL;
  const char *slash = s ? strrchr(s, '/') : NULL;
  if (slash && (size_t)(slash - s) + 2 < sizeof package_dir) {
    package_len = (size_t)(slash - s) + 1;
    memcpy(package_dir, s, package_len);
    package_dir[package_len] = 0;
  }
  Py_XDECREF(file);
  PyErr_Clear(); /* without a __file__ every file is the user's */
  return 0;
}

/* The ready kernels of ops/ and the demo count as user code: their lines are worth showing. */
static bool is_package_file(const char *file) {
  if (package_len && !strncmp(file, package_dir, package_len)) {
    const char *rest = file + package_len;
    return strncmp(rest, "ops/", 4) && strcmp(rest, "__main__.py");
  }
  return !strncmp(file, "<frozen", 7);
}

typedef struct intern_job {
  pm_graph *g;
  const char *text;
  uint32_t id;
} intern_job;

static pm_code intern_body(void *ctx, pm_err *err) {
  intern_job *j = ctx;
  (void)err;
  j->id = pm_intern(j->g, j->text);
  return PM_OK;
}

uint32_t pmpy_intern(pm_graph *g, const char *text) {
  intern_job j = {g, text, 0};
  PMPY_ERR(err);
  return pm_protect(intern_body, &j, &err) ? 0 : j.id;
}

static uint32_t file_of(pmpy_trace *t, PyObject *filename) {
  for (uint32_t k = 0; k < t->n_places && k < PMPY_PLACES; k++) {
    if (t->place[k].filename == filename) return t->place[k].file;
  }
  const char *s = PyUnicode_AsUTF8(filename);
  if (!s) PyErr_Clear();
  uint32_t file = s && !is_package_file(s) ? pmpy_intern(t->g, s) : 0;
  pmpy_place *slot = &t->place[t->n_places++ % PMPY_PLACES];
  Py_XDECREF(slot->filename);
  slot->filename = Py_NewRef(filename);
  slot->file = file;
  return file;
}

/* Innermost frame of a user's file. With a trace its file is interned in *id, else it is *file. */
static void user_frame(pmpy_trace *t, uint32_t *id, const char **file, uint32_t *line) {
  PyFrameObject *f = PyEval_GetFrame();
  Py_XINCREF(f);
  bool found = false;
  while (f && !found) {
    PyCodeObject *code = PyFrame_GetCode(f);
    if (t) {
      *id = file_of(t, code->co_filename);
      found = *id != 0;
    } else {
      const char *s = PyUnicode_AsUTF8(code->co_filename);
      if (!s) PyErr_Clear();
      found = s && !is_package_file(s);
      if (found) *file = s;
    }
    Py_DECREF(code);
    if (found) *line = (uint32_t)PyFrame_GetLineNumber(f);
    PyFrameObject *back = found ? NULL : PyFrame_GetBack(f);
    Py_DECREF(f);
    f = back;
  }
}

void pmpy_user_place(const char **file, uint32_t *line) {
  *file = NULL;
  *line = 0;
  user_frame(NULL, NULL, file, line);
}

void pmpy_stamp(pmpy_trace *t) {
  t->b.file = t->b.line = 0;
  user_frame(t, &t->b.file, NULL, &t->b.line);
}

/* ---- errors -------------------------------------------------------------------------------- */

static void place_error(pm_err *err) {
  const char *file;
  uint32_t line;
  pmpy_user_place(&file, &line);
  if (file) pm_err_at(err, file, line);
}

PyObject *pmpy_fail(pm_code code, const char *fmt, ...) {
  PMPY_ERR(err);
  err.code = code;
  va_list ap;
  va_start(ap, fmt);
  vsnprintf(err.text, sizeof err.text, fmt, ap);
  va_end(ap);
  place_error(&err);
  return pmpy_raise(&err);
}

PyObject *pmpy_tracer_fail(enum pmpy_tracer_error which, const char *fmt, ...) {
  PMPY_ERR(err);
  err.code = PM_E_TYPE;
  va_list ap;
  va_start(ap, fmt);
  vsnprintf(err.text, sizeof err.text, fmt, ap);
  va_end(ap);
  place_error(&err);
  pmpy_raise(&err);
  /* all of them are TypeErrors: only the type is made precise */
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyObject *text = value ? PyObject_Str(value) : NULL;
  if (text) PyErr_SetObject(pmpy.tracer_error[which], text);
  Py_XDECREF(text);
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(traceback);
  return NULL;
}

const char *pmpy_type_text(const pm_type *type) {
  static _Thread_local char text[256];
  int n = snprintf(text, sizeof text, "%s[", pm_element_text(type));
  for (int k = 0; k < type->rank; k++) {
    n += snprintf(text + n, sizeof text - (size_t)n, k ? ",%lld" : "%lld", (long long)type->dim[k]);
  }
  snprintf(text + n, sizeof text - (size_t)n, "]");
  return text;
}

/* ---- names from the source ----------------------------------------------------------------- */

static bool ident_char(char c) {
  return c == '_' || (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

typedef struct target {
  const char *at;
  size_t n;
} target;
enum { MAX_TARGETS = 16 };

static const char *skip_blanks(const char *s) { return s + strspn(s, " \t"); }

/* The names of `name = ...`, `name: T = ...`, `a, (b, c) = ...`; 0: the line is none of these. */
static uint32_t read_targets(const char *line, target *out) {
  uint32_t n = 0;
  const char *p = line;
  for (;; p++) {
    p += strspn(p, " \t()");
    if (*p == '=' && n) break; /* after a last comma */
    out[n].at = p;
    while (ident_char(*p)) p++;
    out[n].n = (size_t)(p - out[n].at);
    if (!out[n].n || (*out[n].at >= '0' && *out[n].at <= '9')) return 0;
    p = skip_blanks(p);
    n++;
    p += strspn(p, " \t)");
    if (*p != ',' || n == MAX_TARGETS) break;
  }
  if (*p == ':' && n == 1) {
    int depth = 0;
    for (p++; *p && *p != '#' && (depth || *p != '='); p++) {
      depth += (*p == '[' || *p == '(' || *p == '{') - (*p == ']' || *p == ')' || *p == '}');
    }
  }
  return p[0] != '=' || p[1] == '=' || strchr(p, ';') ? 0 : n;
}

/* New reference to linecache's list of lines, NULL if there are none (no exception). */
static PyObject *lines_of(const char *file) {
  PyObject *linecache = PyImport_ImportModule("linecache");
  PyObject *lines = linecache ? PyObject_CallMethod(linecache, "getlines", "s", file) : NULL;
  Py_XDECREF(linecache);
  if (!lines) PyErr_Clear();
  if (lines && !PyList_Check(lines)) Py_CLEAR(lines);
  return lines;
}

typedef struct namer {
  pmpy_trace *t;
  PyObject **lines; /* of each file, None where there are none */
  uint32_t n_files;
  uint32_t *used; /* by value: the first op of the last run that uses it */
} namer;

static const char *line_of(namer *n, const pm_op *o) {
  PyObject **lines = &n->lines[o->file];
  if (!*lines) *lines = lines_of(n->t->g->strings.at[o->file]);
  if (!*lines) *lines = Py_NewRef(Py_None);
  if (*lines == Py_None || o->line > PyList_GET_SIZE(*lines)) return NULL;
  PyObject *line = PyList_GET_ITEM(*lines, o->line - 1);
  const char *text = PyUnicode_Check(line) ? PyUnicode_AsUTF8(line) : NULL;
  if (!text) PyErr_Clear();
  return text;
}

static void name_value(namer *n, pm_val v, const target *name) {
  char buffer[64];
  pm_value *value = pm_value_of(n->t->g, v);
  if (value->name || name->n >= sizeof buffer || strspn(name->at, "_") >= name->n) return;
  memcpy(buffer, name->at, name->n);
  buffer[name->n] = 0;
  const uint32_t id = pmpy_intern(n->t->g, buffer);
  pm_value_of(n->t->g, v)->name = id;
}

static void name_results(namer *n, pm_opid op, const target *names) {
  const pm_graph *g = n->t->g;
  const pm_op *o = pm_get(g, op);
  for (uint32_t k = 0; k < o->n_out; k++) name_value(n, o->out + k, &names[k]);
  for (uint32_t r = 0; pm_is_loop(o->code) && r < o->n_regions; r++) {
    const pm_block *b = &g->blocks.at[pm_region(g, op, r)];
    const uint32_t first = b->n_args - o->n_out;
    for (uint32_t k = 0; k < o->n_out; k++) name_value(n, b->arg + first + k, &names[k]);
  }
}

/* An allocation bears its parameter's name; its line is that of the call that made it. */
static bool may_be_named(const pm_graph *g, pm_opid op, pm_blk block) {
  const pm_op *o = pm_get(g, op);
  return o->code && o->parent == block && !(pm_ops[o->code].effects & E_ALLOC) &&
         (o->n_out || o->n_regions);
}

/* Results in the block that no op of the run uses, if they are as many as the names. */
static void name_unused(namer *n, pm_opid first, pm_opid end, pm_blk block, const target *names,
                        uint32_t n_names) {
  const pm_graph *g = n->t->g;
  pm_val found[MAX_TARGETS];
  uint32_t count = 0;
  for (pm_opid op = first; op < end; op++) {
    for (uint32_t k = 0; k < pm_get(g, op)->n_in; k++) n->used[pm_in(g, op, k)] = first;
  }
  for (pm_opid op = first; op < end; op++) {
    const pm_op *o = pm_get(g, op);
    if (!may_be_named(g, op, block)) continue;
    for (uint32_t k = 0; k < o->n_out; k++) {
      if (n->used[o->out + k] == first) continue;
      if (count == n_names) return;
      found[count++] = o->out + k;
    }
  }
  for (uint32_t k = 0; count == n_names && k < count; k++) name_value(n, found[k], &names[k]);
}

/* The ops from `first` to before `end`, of one line. */
static void name_run(namer *n, pm_opid first, pm_opid end) {
  const pm_graph *g = n->t->g;
  target names[MAX_TARGETS];
  while (first < end && (!pm_get(g, first)->code || pm_get(g, first)->code == PM_OP_YIELD)) first++;
  if (first == end) return;
  const pm_blk block = pm_get(g, first)->parent;
  pm_opid last = end - 1;
  while (last > first && !may_be_named(g, last, block)) last--;
  const char *line = may_be_named(g, last, block) ? line_of(n, pm_get(g, last)) : NULL;
  const uint32_t n_names = line ? read_targets(line, names) : 0;
  if (!n_names) return;
  if (pm_get(g, last)->n_out == n_names) name_results(n, last, names);
  else if (n_names > 1) name_unused(n, first, end, block, names, n_names);
}

void pmpy_name_results(pmpy_trace *t) {
  pm_graph *g = t->g;
  namer n = {.t = t, .n_files = g->strings.n};
  n.lines = PyMem_Calloc(n.n_files, sizeof *n.lines);
  n.used = PyMem_Calloc(g->values.n, sizeof *n.used);
  for (pm_opid first = 1, op; n.lines && n.used && first < g->ops.n; first = op) {
    const pm_op *o = pm_get(g, first);
    for (op = first + 1; op < g->ops.n; op++) {
      const pm_op *next = pm_get(g, op);
      if (next->code && (next->file != o->file || next->line != o->line)) break;
    }
    if (o->code && o->line) name_run(&n, first, op);
  }
  for (uint32_t k = 0; n.lines && k < n.n_files; k++) Py_XDECREF(n.lines[k]);
  PyMem_Free(n.lines);
  PyMem_Free(n.used);
}
