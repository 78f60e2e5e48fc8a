/* Streams of a call: how one is specified, how the launch is ordered with the streams of its
 * arrays, and which arrays must outlive the launch.
 *
 * Without stream=, a kernel runs on the current stream of the array library (the home stream),
 * which orders it with everything else that the library does. Arrays of other libraries are ordered
 * by events before and after it. With stream=, nothing is ordered automatically, therefore
 * - DeviceArrays and arrays of unknown libraries, which are used on the default stream, are ordered
 *   with it before and after,
 * - memory of new results, which the library may have used on its own stream, is ordered before,
 * - all arrays are kept until the device has passed the launch.
 *
 * A captured launch runs later and any number of times: nothing is ordered or kept for it. */
#include "call.h"

PyObject *pmpy_name_out, *pmpy_name_stream;

/* ---- what names a stream ------------------------------------------------------------------- */

/* New: the attribute, called if it can be; NULL: absent, or an exception. */
static PyObject *read_attribute(PyObject *o, const char *name) {
  PyObject *a = PyObject_GetAttrString(o, name);
  if (!a) {
    if (PyErr_ExceptionMatches(PyExc_AttributeError)) PyErr_Clear();
    return NULL;
  }
  if (PyCallable_Check(a)) Py_SETREF(a, PyObject_CallNoArgs(a));
  return a;
}

/* New: the handle of o.__cuda_stream__() */
static PyObject *from_protocol(PyObject *pair, const char *who) {
  PyObject *version, *handle;
  if (!PyTuple_Check(pair) || PyTuple_GET_SIZE(pair) != 2)
    return PyErr_Format(PyExc_TypeError, "%s: __cuda_stream__ gives (version, handle), got %.80R",
                        who, pair);
  version = PyTuple_GET_ITEM(pair, 0);
  handle = PyTuple_GET_ITEM(pair, 1);
  if (!PyLong_Check(version) || PyLong_AsLong(version) != 0) {
    PyErr_Clear();
    return PyErr_Format(PyExc_ValueError,
                        "%s: __cuda_stream__ has version %.80R; version 0 is understood", who,
                        version);
  }
  return Py_NewRef(handle);
}

/* New: an int; NULL with an exception */
static PyObject *handle_of(PyObject *o, const char *who) {
  static const char *const others[] = {"cuda_stream", "ptr"}; /* PyTorch, CuPy */
  if (PyLong_Check(o) && !PyBool_Check(o)) return Py_NewRef(o);
  PyObject *found = read_attribute(o, "__cuda_stream__");
  if (found) {
    Py_SETREF(found, from_protocol(found, who));
    return found;
  }
  for (size_t i = 0; i < PM_COUNT(others) && !PyErr_Occurred(); i++) {
    found = read_attribute(o, others[i]);
    if (found) return found;
  }
  if (!PyErr_Occurred())
    PyErr_Format(PyExc_TypeError,
                 "%s: got a %s; objects with __cuda_stream__, streams of PyTorch and CuPy, and "
                 "handles as ints are accepted",
                 who, Py_TYPE(o)->tp_name);
  return NULL;
}

int pmpy_stream_from(PyObject *o, const char *who, void **stream) {
  PyObject *handle = handle_of(o, who);
  if (!handle) return -1;
  if (!PyLong_Check(handle)) {
    PyErr_Format(PyExc_TypeError, "%s: the handle of a stream is an int, got a %s", who,
                 Py_TYPE(handle)->tp_name);
  } else {
    const unsigned long long n = PyLong_AsUnsignedLongLong(handle);
    *stream = (void *)(uintptr_t)n;
    if (PyErr_Occurred()) {
      PyErr_Clear();
      PyErr_Format(PyExc_ValueError, "%s: got %R, which is no handle of a stream", who, handle);
    }
  }
  Py_DECREF(handle);
  return PyErr_Occurred() ? -1 : 0;
}

/* ---- arrays that must outlive the launch ---------------------------------------------------- */

typedef struct pending {
  struct pending *next;
  void *mark;
  int device;
  pmpy_buffer held;
} pending;
static pending *pending_list;
static pthread_mutex_t pending_lock = PTHREAD_MUTEX_INITIALIZER;

/* Release what the device has passed. */
void pmpy_sweep(void) {
  pending *done = NULL;
  pthread_mutex_lock(&pending_lock);
  for (pending **at = &pending_list; *at;) {
    pending *p = *at;
    if (pm_mark_passed(p->device, p->mark)) {
      *at = p->next;
      p->next = done;
      done = p;
    } else {
      at = &p->next;
    }
  }
  pthread_mutex_unlock(&pending_lock);
  while (done) {
    pending *next = done->next;
    pmpy_release(&done->held);
    pm_free(done);
    done = next;
  }
}

/* `keep` (stolen) and what `b` owns, until the launch is over. */
static int add_pending(int device, void *stream, pmpy_buffer *b, PyObject *keep) {
  pm_err err = {0};
  pending *p = pm_malloc(sizeof *p);
  if (!p) PyErr_NoMemory();
  else if (pm_mark(device, stream, &p->mark, &err)) pmpy_raise(&err);
  if (PyErr_Occurred()) {
    Py_XDECREF(keep);
    pm_free(p);
    return -1;
  }
  p->device = device;
  p->held = *b;
  p->held.keep = keep;
  b->keep = NULL;
  b->managed = NULL;
  b->managed_old = NULL;
  pthread_mutex_lock(&pending_lock);
  p->next = pending_list;
  pending_list = p;
  pthread_mutex_unlock(&pending_lock);
  return 0;
}

int pmpy_hold(pmpy_call *c, void *stream, PyObject *const *made, uint32_t n_made) {
  for (uint32_t i = 0; i < c->n_in + c->n_out_given; i++) {
    pmpy_buffer *b = &c->in[i];
    const int library = b->source->library;
    if (!b->cuda || (!c->has_stream && library != PMPY_JAX && library != PMPY_OTHER)) continue;
    if (i >= c->n_args && i < c->n_in) continue; /* a part of another one */
    PyObject *keep = b->keep;
    if (!keep) keep = Py_NewRef(i < c->n_in ? c->args[i] : c->out_args[i - c->n_in]);
    b->keep = NULL;
    if (add_pending(c->device, stream, b, keep) < 0) return -1;
  }
  for (uint32_t i = 0; i < n_made; i++) {
    pmpy_buffer none = {0};
    if (add_pending(c->device, stream, &none, Py_NewRef(made[i])) < 0) return -1;
  }
  return 0;
}

/* ---- order --------------------------------------------------------------------------------- */

static int order(int device, void *first, void *then) {
  pm_err err = {0};
  if (!pm_stream_order(device, first, then, &err)) return 0;
  pmpy_raise(&err);
  return -1;
}

static bool is_known(const pmpy_source *s) {
  return s->library == PMPY_TORCH || s->library == PMPY_CUPY;
}

int pmpy_order(const pmpy_call *c, void *stream, bool before) {
  for (uint32_t i = 0; i < c->n_in + c->n_out_given; i++) {
    const pmpy_buffer *b = &c->in[i];
    void *other;
    if (!b->cuda || (c->has_stream ? is_known(b->source) : b->source->library == c->home->library))
      continue;
    if (pmpy_current_stream(b->source, c->device, &other) < 0) return -1;
    if (order(c->device, before ? other : stream, before ? stream : other) < 0) return -1;
  }
  return 0;
}

int pmpy_order_home(const pmpy_call *c, void *stream) {
  void *current;
  if (pmpy_current_stream(c->home, c->device, &current) < 0) return -1;
  return order(c->device, current, stream);
}

int pmpy_init_streams(PyObject *module) {
  (void)module;
  pmpy_name_out = PyUnicode_InternFromString("out");
  pmpy_name_stream = PyUnicode_InternFromString("stream");
  return pmpy_name_out && pmpy_name_stream ? 0 : -1;
}
