/* The place in the user's source: of the ops of a trace, of errors, and names that stand there.
 *
 * The user's place is the innermost frame whose file is not of the package; the ready kernels of
 * ops/ and the demo count as user code, since their lines are worth showing. A trace remembers the
 * files of a few code objects, because looking at their names takes longer than adding an op.
 *
 * Names: when a trace is finished, consecutive ops of one source line form a run. If the line reads
 * `name = ...`, the last result of the run gets that name. */
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

/* `name = ...` or `name: T = ...`: length of the name, its start in *name; 0: no such line. */
static size_t target_of(const char *line, const char **name) {
  while (*line == ' ' || *line == '\t') line++;
  size_t n = 0;
  while (ident_char(line[n])) n++;
  if (!n || (line[0] >= '0' && line[0] <= '9')) return 0;
  const char *p = line + n;
  while (*p == ' ' || *p == '\t') p++;
  if (*p == ':') {
    int depth = 0;
    for (p++; *p && *p != '#' && (depth || *p != '='); p++) {
      depth += (*p == '[' || *p == '(' || *p == '{') - (*p == ']' || *p == ')' || *p == '}');
    }
  }
  if (p[0] != '=' || p[1] == '=' || strchr(p, ';')) return 0;
  *name = line;
  return n;
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

static void name_result(pmpy_trace *t, pm_opid op, PyObject *lines) {
  const pm_op *o = pm_get(t->g, op);
  if (!lines || o->line > PyList_GET_SIZE(lines)) return;
  PyObject *line = PyList_GET_ITEM(lines, o->line - 1);
  const char *text = PyUnicode_Check(line) ? PyUnicode_AsUTF8(line) : NULL, *name;
  if (!text) {
    PyErr_Clear();
    return;
  }
  size_t n = target_of(text, &name);
  char buffer[64];
  if (!n || n >= sizeof buffer) return;
  memcpy(buffer, name, n);
  buffer[n] = 0;
  pm_value *v = pm_value_of(t->g, o->out);
  if (!v->name) v->name = pmpy_intern(t->g, buffer);
}

void pmpy_name_results(pmpy_trace *t) {
  pm_graph *g = t->g;
  uint32_t n_files = g->strings.n, file = 0, line = 0;
  PyObject **lines = PyMem_Calloc(n_files, sizeof *lines);
  if (!lines) return;
  bool done = true;
  for (pm_opid op = g->ops.n; op-- > 1;) {
    const pm_op *o = pm_get(g, op);
    if (!o->code || !o->line) continue;
    if (o->file != file || o->line != line) {
      file = o->file;
      line = o->line;
      done = false;
    }
    /* an allocation bears its parameter's name; its line is that of the call that made it */
    bool alloc = o->code == PM_OP_ALLOC_SMEM || o->code == PM_OP_ALLOC_BARRIER ||
                 o->code == PM_OP_ALLOC_ACC || o->code == PM_OP_ALLOC_SEMAPHORE;
    if (done || alloc || (!o->n_out && !o->n_regions)) continue;
    done = true;
    if (o->n_out != 1) continue; /* no one name is right for several results */
    if (!lines[file]) {
      lines[file] = lines_of(g->strings.at[file]);
      if (!lines[file]) lines[file] = Py_NewRef(Py_None);
    }
    if (lines[file] != Py_None) name_result(t, op, lines[file]);
  }
  for (uint32_t k = 0; k < n_files; k++) Py_XDECREF(lines[k]);
  PyMem_Free(lines);
}
