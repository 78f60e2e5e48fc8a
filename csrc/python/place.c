/* The place in the user's source: of the ops of a trace, of errors, and names that stand there.
 *
 * The user's place is the innermost frame whose file is not of the package, nor of PyTorch or JAX,
 * which trace kernels when they compile what calls them. The ready kernels of ops/ and the demo
 * count as user code, since their lines are worth showing. A trace remembers the
 * files of a few code objects, because looking at their names takes longer than adding an op.
 *
 * Names: when a trace is finished, consecutive ops of one source line form a run; those of a
 * function that the line calls are in it. If the line reads `name = ...`, the last result of the
 * run gets that name. If it reads `a, b = ...`, so do the results of the last op if there are as
 * many, else those of the run that no op of it uses, if there are as many. Several results of one
 * op share a single name, and a target `_` need not be one of them; the name of a tuple, list or
 * dict is none of its elements'. Runs of lines inside of the
 * function come first. Ops in regions of others of the run (of a lambda) do not count. What a
 * loop carries is named as its results are. */
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
  return !strncmp(file, "<frozen", 7) || strstr(file, "/site-packages/jax/") ||
         strstr(file, "/site-packages/torch/");
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

/* Of the frame, which executes this code. Python looks for it from the beginning of the function.
 */
static uint32_t line_in(pmpy_trace *t, PyFrameObject *f, PyCodeObject *code) {
  if (!t) return (uint32_t)PyFrame_GetLineNumber(f);
  const int at = PyFrame_GetLasti(f);
  pmpy_instruction *x = &t->instructions[((uintptr_t)code / 16 + (unsigned)at / 2) % PMPY_LINES];
  if (x->code == (PyObject *)code && x->at == at) return x->line;
  Py_XSETREF(x->code, Py_NewRef((PyObject *)code));
  x->at = at;
  return x->line = (uint32_t)PyFrame_GetLineNumber(f);
}

/* The calls that led from functions of the user's to this frame, where they changed. The trace
 * holds the last frame, so that no other one has its address. */
static void note_calls(pmpy_trace *t, PyFrameObject *frame) {
  if (t->frame == (PyObject *)frame) return;
  Py_XSETREF(t->frame, Py_NewRef((PyObject *)frame));
  pmpy_calls c = {.from = t->g->ops.n};
  const pmpy_calls *last = t->n_calls ? &t->calls[t->n_calls - 1] : NULL;
  PyFrameObject *f = PyFrame_GetBack(frame);
  while (f && c.n < PMPY_CALLS) {
    PyCodeObject *code = PyFrame_GetCode(f);
    const uint32_t file = file_of(t, code->co_filename);
    if (file) c.at[c.n++] = (pmpy_line){file, line_in(t, f, code)};
    Py_DECREF(code);
    if (!file) break;
    PyFrameObject *back = PyFrame_GetBack(f);
    Py_DECREF(f);
    f = back;
  }
  Py_XDECREF(f);
  if (last ? last->n == c.n && !memcmp(last->at, c.at, c.n * sizeof *c.at) : !c.n) return;
  if (last && last->from == c.from) t->n_calls--;
  if (t->n_calls == t->cap_calls) {
    const uint32_t cap = t->cap_calls ? 2 * t->cap_calls : 16;
    pmpy_calls *more = PyMem_Realloc(t->calls, cap * sizeof *more);
    if (!more) return; /* names are missing */
    t->calls = more;
    t->cap_calls = cap;
  }
  t->calls[t->n_calls++] = c;
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
    if (found) *line = line_in(t, f, code);
    Py_DECREF(code);
    if (found && t) note_calls(t, f);
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

void pmpy_put_place(pmpy_trace *t, PyObject *filename, uint32_t line) {
  t->at_file = filename ? file_of(t, filename) : 0;
  t->at_line = line;
}

void pmpy_stamp(pmpy_trace *t) {
  if (t->at_file) {
    t->b.file = t->at_file;
    t->b.line = t->at_line;
    return;
  }
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

static bool is_ignored(const target *x) { return strspn(x->at, "_") >= x->n; }

/* Is the value of the line an element of what is called? */
static bool picks(const char *line) {
  size_t n = strlen(line);
  while (n && strchr(" \t\r\n", line[n - 1])) n--;
  return n && line[n - 1] == ']';
}

/* Is the value of the line a tuple, a list or a dict, as far as the line tells? One that ends with
 * its comma is a keyword argument of a call over several lines. */
static bool holds_several(const char *line) {
  const char *p = skip_blanks(strchr(line, '=') + 1);
  bool enclosed = *p == '(';
  if (*p == '[' || *p == '{') return true;
  int depth = 0;
  for (; *p && *p != '#'; p++) {
    depth += (*p == '(' || *p == '[' || *p == '{') - (*p == ')' || *p == ']' || *p == '}');
    enclosed = enclosed && depth;
    if (*p == ',' && depth == enclosed) return !strchr("#\r\n", *skip_blanks(p + 1));
  }
  return false;
}

/* Without the targets `_`, if as many as `wanted` are left. */
static uint32_t without_ignored(target *names, uint32_t n, uint32_t wanted) {
  uint32_t left = 0;
  for (uint32_t k = 0; k < n; k++) left += !is_ignored(&names[k]);
  if (left != wanted) return n;
  left = 0;
  for (uint32_t k = 0; k < n; k++) {
    if (!is_ignored(&names[k])) names[left++] = names[k];
  }
  return left;
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
  uint64_t *key; /* by op: the lines that led to it, down to the depth that is looked at; 0: none */
} namer;

static const char *line_of(namer *n, pmpy_line at) {
  PyObject **lines = &n->lines[at.file];
  if (!*lines) *lines = lines_of(n->t->g->strings.at[at.file]);
  if (!*lines) *lines = Py_NewRef(Py_None);
  if (*lines == Py_None || at.line > PyList_GET_SIZE(*lines)) return NULL;
  PyObject *line = PyList_GET_ITEM(*lines, at.line - 1);
  const char *text = PyUnicode_Check(line) ? PyUnicode_AsUTF8(line) : NULL;
  if (!text) PyErr_Clear();
  return text;
}

static void name_value(namer *n, pm_val v, const target *name) {
  char buffer[64];
  pm_value *value = pm_value_of(n->t->g, v);
  if (value->name || name->n >= sizeof buffer || is_ignored(name)) return;
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
static bool may_be_named(const pm_op *o) {
  return o->code && !(pm_ops[o->code].effects & E_ALLOC) && (o->n_out || o->n_regions);
}

/* Results of ops of a run that no op from `first` to before `end` uses, if they are as many as the
 * names. */
static void name_unused(namer *n, const pm_opid *run, uint32_t n_run, pm_opid end,
                        const target *names, uint32_t n_names) {
  const pm_graph *g = n->t->g;
  const pm_opid first = run[0];
  pm_val found[MAX_TARGETS];
  uint32_t count = 0;
  for (pm_opid op = first; op < end; op++) {
    for (uint32_t k = 0; k < pm_get(g, op)->n_in; k++) n->used[pm_in(g, op, k)] = first;
  }
  for (uint32_t j = 0; j < n_run; j++) {
    const pm_op *o = pm_get(g, run[j]);
    if (!may_be_named(o)) continue;
    for (uint32_t k = 0; k < o->n_out; k++) {
      if (n->used[o->out + k] == first) continue;
      if (count == n_names) return;
      found[count++] = o->out + k;
    }
  }
  for (uint32_t k = 0; count == n_names && k < count; k++) name_value(n, found[k], &names[k]);
}

/* Ops of one block, one after the other, that the line made; the next one has the number `end`. */
static void name_run(namer *n, const pm_opid *run, uint32_t n_run, pm_opid end, pmpy_line at) {
  const pm_graph *g = n->t->g;
  target names[MAX_TARGETS];
  uint32_t last = n_run - 1;
  while (last && !may_be_named(pm_get(g, run[last]))) last--;
  if (!may_be_named(pm_get(g, run[last]))) return;
  const char *line = line_of(n, at);
  uint32_t n_names = line ? read_targets(line, names) : 0;
  const uint32_t n_out = pm_get(g, run[last])->n_out;
  if (!n_names) return;
  if (n_names == 1 && holds_several(line)) return;
  if (n_names == 1 && n_out <= MAX_TARGETS && !picks(line)) {
    while (n_names < n_out) names[n_names++] = names[0];
  }
  if (n_names > n_out) n_names = without_ignored(names, n_names, n_out);
  if (n_out == n_names) name_results(n, run[last], names);
  else if (n_names > 1) name_unused(n, run, n_run, end, names, n_names);
}

/* The line at a depth: of a call, from the outermost one on, or of the op itself. */
static pmpy_line line_at(const pm_op *o, const pmpy_calls *c, uint32_t depth) {
  const uint32_t n = c ? c->n : 0;
  if (depth < n) return c->at[n - 1 - depth];
  return depth == n ? (pmpy_line){o->file, o->line} : (pmpy_line){0};
}

/* The last calls before an op, from the k-th on. */
static const pmpy_calls *calls_of(const pmpy_trace *t, pm_opid op, uint32_t *k) {
  while (*k < t->n_calls && t->calls[*k].from <= op) ++*k;
  return *k ? &t->calls[*k - 1] : NULL;
}

static void set_keys(namer *n, uint32_t depth) {
  const pm_graph *g = n->t->g;
  uint32_t k = 0;
  for (pm_opid op = 1; op < g->ops.n; op++) {
    const pmpy_calls *c = calls_of(n->t, op, &k);
    uint64_t key = 0;
    for (uint32_t d = 0; d <= depth; d++) {
      const pmpy_line at = line_at(pm_get(g, op), c, d);
      key = at.line ? key * 0x9e3779b97f4a7c15u + ((uint64_t)at.file << 32 | at.line) : 0;
    }
    n->key[op] = key;
  }
}

static void name_block(namer *n, const pm_block *b, uint32_t depth) {
  const pm_graph *g = n->t->g;
  const uint64_t outer = b->parent ? n->key[b->parent] : 0; /* a lambda's: that of its user */
  uint32_t calls = 0;
  for (uint32_t k = 0, end; k < b->ops.n; k = end) {
    const pm_opid *run = &b->ops.at[k];
    const uint64_t key = n->key[*run];
    for (end = k + 1; end < b->ops.n && n->key[b->ops.at[end]] == key;) end++;
    if (!key || key == outer) continue;
    const pm_opid next = end < b->ops.n ? b->ops.at[end] : g->ops.n;
    const pmpy_line at = line_at(pm_get(g, *run), calls_of(n->t, *run, &calls), depth);
    name_run(n, run, end - k, next, at);
  }
}

void pmpy_name_results(pmpy_trace *t) {
  const pm_graph *g = t->g;
  namer n = {.t = t, .n_files = g->strings.n};
  uint32_t depth = 0;
  n.lines = PyMem_Calloc(n.n_files, sizeof *n.lines);
  n.used = PyMem_Calloc(g->values.n, sizeof *n.used);
  n.key = PyMem_Calloc(g->ops.n, sizeof *n.key);
  for (uint32_t k = 0; k < t->n_calls; k++) depth = (uint32_t)pm_max(depth, t->calls[k].n);
  for (depth++; n.lines && n.used && n.key && depth-- > 0;) {
    memset(n.used, 0, g->values.n * sizeof *n.used);
    set_keys(&n, depth);
    for (uint32_t b = 1; b < g->blocks.n; b++) name_block(&n, &g->blocks.at[b], depth);
  }
  for (uint32_t k = 0; n.lines && k < n.n_files; k++) Py_XDECREF(n.lines[k]);
  PyMem_Free(n.lines);
  PyMem_Free(n.used);
  PyMem_Free(n.key);
}
