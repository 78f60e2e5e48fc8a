/* Family: a function of arrays and options that finds its kernel by their types and values.
 *
 * Arrays in a call, by position or by name, are operands; everything else passed by name is an
 * option. None by position, for an operand that may be omitted, is one, too. The signature of a
 * call (signatures.h) consists of the device of the arrays, their dtypes, shapes and alignment, and
 * hashes of the names and values of the options in the order given. A hit is one pass over the
 * arguments, one hash, and from there the kernel's own call (call.h); no Python code runs. A miss
 * calls `make`, which binds the arguments to the signature and knows the kernels made for other
 * spellings of the same call.
 *
 * Calls that come often may deserve a better kernel. Every OFTEN calls `improve` is asked, with the
 * arguments of `make`: None means later, False never, and True that `make` now makes another one.
 *
 * A family keeps a limited number of entries; beyond that, the least recently used are dropped. A
 * reader of an entry holds a reference to it, since another thread may remove it meanwhile. */
#include "kernel.h"

#include <stddef.h>
#include <structmember.h>

enum { ALIGNMENT = 16, MOST_ENTRIES = 1024, OFTEN = 128 };

typedef struct entry {
  pmpy_signature signature; /* what a table holds */
  int refs;                 /* the table's, and of those that look at it */
  uint32_t n_values, n_order;
  PyObject **values; /* owned, items too; NULL stands for an array */
  PyObject *target;  /* owned: a kernel, or a function of arrays */
  uint64_t used;     /* the family's `now` at the last hit */
  uint32_t hits;     /* OFTEN and more: there is nothing to ask for */
  bool direct;       /* a kernel, of views or not, whose operands are in the order of the call */
  uint8_t order[PMPY_MAX_PARAMS];
} entry;

typedef struct family {
  PyObject_HEAD vectorcallfunc vectorcall;
  PyObject *dict, *weakrefs;
  PyObject *name, *make, *improve; /* the last one may be NULL */
  PyObject *parameters;            /* a tuple of names: what may be passed by position */
  Py_ssize_t n_required;           /* so many of them have no default */
  pmpy_table table;                /* of entries */
  uint64_t now;                    /* ticks with each miss */
  bool in_place;                   /* out= may be an operand */
} family;

static PyObject *call_names[4]; /* of keywords: bit 0 out=, bit 1 stream= */

/* ---- one call ----------------------------------------------------------------------------- */

typedef struct request {
  pmpy_call c;
  PyObject *const *args;
  Py_ssize_t n_args, n_kw;
  PyObject *names;                      /* borrowed: of the keywords, or NULL */
  PyObject *out, *stream;               /* borrowed, or NULL */
  PyObject *operand[PMPY_MAX_PARAMS];   /* borrowed; used where arrays are given by name */
  PyObject *value[2 * PMPY_MAX_PARAMS]; /* names and values of options, NULL for arrays */
  uint32_t n_operands, n_values;
  uint32_t unhashable; /* the number of a value, which is never 0, or 0 */
  pmpy_new_signature signature;
} request;

static int too_many(const family *f) {
  PyErr_Format(PyExc_NotImplementedError, "%U: at most %d arguments are supported", f->name,
               PMPY_MAX_PARAMS);
  return -1;
}

/* Sort the arguments into operands and options; 0 or -1. */
static int sort(const family *f, request *r, bool specs) {
  if (r->n_args + r->n_kw > PMPY_MAX_PARAMS) return too_many(f);
  r->n_operands = (uint32_t)r->n_args;
  r->n_values = 0;
  r->out = r->stream = NULL;
  for (Py_ssize_t i = 0; i < r->n_kw; i++) {
    PyObject *name = PyTuple_GET_ITEM(r->names, i), *o = r->args[r->n_args + i];
    const pmpy_keyword what = pmpy_keyword_of(name);
    if (what != PMPY_KW_OTHER) {
      if (o != Py_None) *(what == PMPY_KW_OUT ? &r->out : &r->stream) = o;
      continue;
    }
    bool is_array = pmpy_is_array(o, specs);
    r->value[r->n_values++] = name;
    r->value[r->n_values++] = is_array ? NULL : o;
    if (!is_array) continue;
    if (r->n_operands == (uint32_t)r->n_args)
      memcpy(r->operand, r->args, (size_t)r->n_args * sizeof *r->operand);
    r->operand[r->n_operands++] = o;
  }
  return 0;
}

static bool is_misaligned(const pmpy_buffer *b) { return b->cuda && b->ptr % ALIGNMENT; }

/* The device, how many operands are by position, the arrays, and hashes of the options. 1: made,
 * 0: an option has no hash, -1: exception. */
static int make_signature(request *r) {
  const pmpy_call *c = &r->c;
  int64_t *at = pmpy_signature_begin(&r->signature, 2 + pmpy_sign_most(c->n_in) + r->n_values);
  const pm_target *asked = NULL;
  PMPY_ERR(err);
  if (!at) return -1;
  if (!c->cuda && pm_asked_target(&asked, &err)) {
    pmpy_raise(&err);
    return -1;
  }
  *at++ = c->cuda ? c->device : asked ? -2 - (asked - pm_targets) : -1;
  *at++ = r->n_args;
  for (uint32_t i = 0; i < c->n_in; i++)
    at = pmpy_sign(at, &c->in[i], is_misaligned(&c->in[i]));
  for (uint32_t i = 0; i < r->n_values; i++) {
    *at = -2; /* no hash is -1, and few are -2 */
    if (r->value[i] && (*at = PyObject_Hash(r->value[i])) == -1) {
      if (!PyErr_ExceptionMatches(PyExc_TypeError)) return -1;
      PyErr_Clear();
      r->unhashable = i;
      return 0;
    }
    at++;
  }
  pmpy_signature_end(&r->signature, at);
  return 1;
}

/* Raise for what `begin` found to be neither an array nor an option. */
static void refuse(const family *f, const request *r) {
  const uint32_t i = r->unhashable;
  if (!i) pmpy_call_refuse(&r->c);
  else
    PyErr_Format(PyExc_TypeError, "%U: %U must be an array or hashable, got a %s", f->name,
                 r->value[i - 1], Py_TYPE(r->value[i])->tp_name);
}

/* 1: found all there is to know about the call, 0: operand n_in is no array, or an option has no
 * hash, -1: exception. The request must be ended in every case. */
static int begin(const family *f, request *r, PyObject *const *args, Py_ssize_t n, PyObject *names,
                 bool specs) {
  r->args = args;
  r->n_args = n;
  r->n_kw = names ? PyTuple_GET_SIZE(names) : 0;
  r->names = names;
  r->signature.many = NULL;
  r->unhashable = 0;
  pmpy_call_clear(&r->c);
  if (sort(f, r, specs) < 0) return -1;
  r->c.for_xla = !r->out && !r->stream;
  PyObject *const *operands = r->n_operands == (uint32_t)n ? args : r->operand;
  int code = pmpy_call_read(&r->c, f->name, operands, r->n_operands, r->out, specs);
  if (code <= 0) return code;
  if (pmpy_call_stream(&r->c, r->stream) < 0 || pmpy_call_locate(&r->c) < 0) return -1;
  return make_signature(r);
}

static void end(request *r) {
  pmpy_call_end(&r->c);
  pmpy_signature_drop(&r->signature);
}

/* ---- entries ------------------------------------------------------------------------------ */

static entry *keep(entry *e) {
#ifdef Py_GIL_DISABLED
  __atomic_add_fetch(&e->refs, 1, __ATOMIC_RELAXED);
#else
  e->refs++;
#endif
  return e;
}

static void drop(entry *e) {
  if (!e) return;
#ifdef Py_GIL_DISABLED
  if (__atomic_sub_fetch(&e->refs, 1, __ATOMIC_ACQ_REL)) return;
#else
  if (--e->refs) return;
#endif
  for (uint32_t i = 0; e->values && i < e->n_values; i++) Py_XDECREF(e->values[i]);
  Py_XDECREF(e->target);
  PyMem_Free(e->values);
  pmpy_signature_free(&e->signature);
  PyMem_Free(e);
}

/* 1: equal and of the same types, 0: not, -1: exception */
static int same_values(const entry *e, const request *r) {
  for (uint32_t i = 0; i < r->n_values; i++) {
    PyObject *a = e->values[i], *b = r->value[i];
    if (a == b) continue;
    if (!a || !b || Py_TYPE(a) != Py_TYPE(b)) return 0;
    int equal = PyObject_RichCompareBool(a, b, Py_EQ);
    if (equal <= 0) return equal;
  }
  return 1;
}

/* 1: *found, which is kept; 0: there is none, -1: exception. Comparing runs code of the user,
 * outside of the lock. *often: it is time to ask for a better kernel. */
static int find(family *f, const request *r, entry **found, bool *often) {
  const pmpy_signature *wanted = &r->signature.is;
  for (uint32_t probe = (uint32_t)wanted->hash;;) {
    entry *e;
    Py_BEGIN_CRITICAL_SECTION(f);
    e = (entry *)pmpy_table_find(&f->table, wanted, &probe);
    if (e) keep(e)->used = f->now;
    *often = e && e->hits < OFTEN && ++e->hits == OFTEN;
    Py_END_CRITICAL_SECTION();
    if (!e) return 0;
    const int same = e->n_values == r->n_values ? same_values(e, r) : 0;
    *found = e;
    if (same > 0) return 1;
    drop(e);
    if (same) return same;
  }
}

static int by_use(const void *a, const void *b) {
  const uint64_t x = (*(entry *const *)a)->used, y = (*(entry *const *)b)->used;
  return x < y ? -1 : x > y;
}

/* Take n entries, those longest unused, out of the table. NULL: out of memory. */
static entry **take_oldest(family *f, uint32_t n) {
  entry **all = PyMem_Malloc(f->table.n * sizeof *all);
  uint32_t k = 0;
  if (!all) return NULL;
  for (uint32_t i = 0; i < f->table.capacity; i++)
    if (f->table.at[i]) all[k++] = (entry *)f->table.at[i];
  qsort(all, k, sizeof *all, by_use);
  for (uint32_t i = 0; i < n; i++) pmpy_table_remove(&f->table, &all[i]->signature);
  return all;
}

/* Into the table, which gets a reference. Two threads may both add the same call: either serves. */
static int add(family *f, entry *e) {
  bool ok;
  entry **oldest = NULL;
  const uint32_t n = MOST_ENTRIES / 4;
  Py_BEGIN_CRITICAL_SECTION(f);
  if (f->table.n >= MOST_ENTRIES) oldest = take_oldest(f, n);
  ok = pmpy_table_add(&f->table, &e->signature);
  if (ok) {
    e->used = ++f->now;
    keep(e);
  }
  Py_END_CRITICAL_SECTION();
  for (uint32_t i = 0; oldest && i < n; i++) drop(oldest[i]);
  PyMem_Free(oldest);
  if (!ok) PyErr_NoMemory();
  return ok ? 0 : -1;
}

/* ---- a miss ------------------------------------------------------------------------------- */

/* New: strides in elements, or None for row-major order */
static PyObject *strides_of(const pmpy_buffer *b) {
  if (!b->strided) Py_RETURN_NONE;
  pmpy_spec s = {.rank = b->rank};
  memcpy(s.shape, b->stride, sizeof s.shape);
  return pmpy_spec_shape(&s);
}

/* New: (shape, dtype, device or None, aligned, strides) */
static PyObject *describe(const pmpy_call *c, uint32_t i) {
  const pmpy_buffer *b = &c->in[i];
  pmpy_spec s = {.dtype = b->dtype, .rank = b->rank};
  memcpy(s.shape, b->shape, sizeof s.shape);
  PyObject *shape = pmpy_spec_shape(&s), *dtype = pmpy_dtype_object((pm_dtype)s.dtype);
  PyObject *device = c->cuda ? PyLong_FromLong(c->device) : Py_NewRef(Py_None);
  PyObject *strides = strides_of(b), *all = NULL;
  if (shape && dtype && device && strides)
    all = PyTuple_Pack(5, shape, dtype, device, is_misaligned(b) ? Py_False : Py_True, strides);
  Py_XDECREF(strides);
  Py_XDECREF(device);
  Py_XDECREF(dtype);
  Py_XDECREF(shape);
  return all;
}

static int add_array(PyObject *arrays, PyObject *name, const pmpy_call *c, uint32_t i) {
  PyObject *d = describe(c, i);
  int code = d ? PyDict_SetItem(arrays, name, d) : -1;
  Py_XDECREF(d);
  return code;
}

/* New: f->make or f->improve of (positional arrays, arrays by name, options) */
static PyObject *call_with_all(PyObject *function, const request *r) {
  const uint32_t n = (uint32_t)r->n_args;
  PyObject *args = PyTuple_New(n), *arrays = PyDict_New(), *options = PyDict_New(), *made = NULL;
  uint32_t next = n;
  if (!args || !arrays || !options) goto done;
  for (uint32_t i = 0; i < n; i++) {
    PyObject *d = describe(&r->c, i);
    if (!d) goto done;
    PyTuple_SET_ITEM(args, i, d);
  }
  for (uint32_t i = 0; i < r->n_values; i += 2) {
    PyObject *name = r->value[i], *value = r->value[i + 1];
    if ((value ? PyDict_SetItem(options, name, value) : add_array(arrays, name, &r->c, next++)) < 0)
      goto done;
  }
  made = PyObject_CallFunctionObjArgs(function, args, arrays, options, NULL);
done:
  Py_XDECREF(options);
  Py_XDECREF(arrays);
  Py_XDECREF(args);
  return made;
}

/* Borrowed: the kernel that a target is, perhaps of views; or NULL. */
static pmpy_kernel *kernel_of(PyObject *target) {
  const pmpy_views *views;
  if (Py_TYPE(target) == pmpy.reshaped_type) target = pmpy_reshaped_parts(target, &views);
  return Py_TYPE(target) == pmpy.kernel_type ? (pmpy_kernel *)target : NULL;
}

/* Read (target, order) into the entry. */
static int read_made(const family *f, const request *r, PyObject *made, entry *e) {
  PyObject *target, *order;
  if (!PyTuple_Check(made) || !PyArg_ParseTuple(made, "OO!", &target, &PyTuple_Type, &order) ||
      PyTuple_GET_SIZE(order) != r->n_operands) {
    if (!PyErr_Occurred())
      PyErr_Format(PyExc_TypeError, "%U: make returns (kernel, order of the operands)", f->name);
    return -1;
  }
  e->target = Py_NewRef(target);
  pmpy_kernel *k = kernel_of(target);
  e->direct = k;
  if (k && !f->in_place) k->apart = true; /* whoever calls it */
  e->n_order = r->n_operands;
  for (uint32_t i = 0; i < e->n_order; i++) {
    long k = PyLong_AsLong(PyTuple_GET_ITEM(order, i));
    if (k < 0 || k >= (long)e->n_order) {
      if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "order out of range");
      return -1;
    }
    e->order[i] = (uint8_t)k;
    e->direct &= k == (long)i;
  }
  return 0;
}

static int copy_key(const request *r, entry *e) {
  if (pmpy_signature_copy(&e->signature, &r->signature.is) < 0) return -1;
  e->values = PyMem_Calloc(r->n_values + 1, sizeof *e->values);
  if (!e->values) return PyErr_NoMemory(), -1;
  for (e->n_values = 0; e->n_values < r->n_values; e->n_values++)
    e->values[e->n_values] = Py_XNewRef(r->value[e->n_values]);
  return 0;
}

/* A kernel that is not compiled yet cannot be put into a graph that is being captured. */
static bool is_captured(const request *r) {
  void *stream = NULL;
  if (!r->c.cuda) return false;
  if (pmpy_call_find_stream(&r->c, r->c.device, &stream) == 0)
    return pm_stream_is_capturing(r->c.device, stream);
  PyErr_Clear(); /* the call itself tells */
  return true;
}

/* Is there a better kernel than that of an entry with OFTEN hits? If not yet, they count anew. */
static bool has_better(const family *f, const request *r, entry *e) {
  if (!f->improve) return false;
  PyObject *found = is_captured(r) ? Py_NewRef(Py_None) : call_with_all(f->improve, r);
  if (!found) PyErr_WriteUnraisable(f->name);
  if (found == Py_None) e->hits = 0;
  Py_XDECREF(found);
  return found == Py_True;
}

static void take_out(family *f, entry *e) {
  bool there = false;
  Py_BEGIN_CRITICAL_SECTION(f);
  const pmpy_signature *s = &e->signature;
  for (uint32_t probe = (uint32_t)s->hash; !there && (s = pmpy_table_find(&f->table, s, &probe));)
    there = s == &e->signature;
  if (there) pmpy_table_remove(&f->table, &e->signature);
  Py_END_CRITICAL_SECTION();
  if (there) drop(e);
}

/* Kept; NULL with an exception. */
static entry *look(family *f, const request *r) {
  entry *e = NULL;
  bool often = false;
  int code = find(f, r, &e, &often);
  if (code < 0) return NULL;
  if (code && !(often && has_better(f, r, e))) return e;
  if (code) {
    take_out(f, e);
    drop(e);
  }
  PyObject *made = call_with_all(f->make, r);
  e = made ? PyMem_Calloc(1, sizeof *e) : NULL;
  if (made && !e) PyErr_NoMemory();
  if (e) keep(e);
  if (e && (read_made(f, r, made, e) < 0 || copy_key(r, e) < 0 || add(f, e) < 0)) {
    drop(e);
    e = NULL;
  }
  Py_XDECREF(made);
  return e;
}

/* ---- calling ------------------------------------------------------------------------------ */

/* New: the target called as any function is. The request's arrays are released first. */
static PyObject *call_target(request *r, const entry *e) {
  PyObject *args[PMPY_MAX_PARAMS + 2];
  PyObject *const *given = r->n_operands == (uint32_t)r->n_args ? r->args : r->operand;
  for (uint32_t i = 0; i < e->n_order; i++) args[i] = given[e->order[i]];
  const int names = (r->out ? 1 : 0) | (r->stream ? 2 : 0);
  args[e->n_order] = r->out ? r->out : r->stream;
  args[e->n_order + 1] = r->stream;
  pmpy_call_end(&r->c);
  return PyObject_Vectorcall(e->target, args, e->n_order, call_names[names]);
}

static PyObject *run_direct(request *r, const entry *e) {
  PyObject *kernel = e->target;
  if (Py_TYPE(kernel) == pmpy.reshaped_type) kernel = pmpy_reshaped_parts(kernel, &r->c.views);
  return pmpy_call_run(&r->c, kernel);
}

/* The number of arguments before the first one that is None and may be. */
static Py_ssize_t until_none(const family *f, PyObject *const *args, Py_ssize_t n) {
  Py_ssize_t i = f->n_required;
  while (i < n && args[i] != Py_None) i++;
  return n <= PyTuple_GET_SIZE(f->parameters) ? i : n;
}

/* New: called(...) with the arguments from number `first` by name. */
static PyObject *call_by_name(const family *f, PyObject *called, PyObject *const *args,
                              Py_ssize_t n, PyObject *names, Py_ssize_t first) {
  PyObject *given = PyTuple_GetSlice(f->parameters, first, n), *all = given;
  if (given && names) {
    all = PySequence_Concat(given, names);
    Py_DECREF(given);
  }
  PyObject *result = all ? PyObject_Vectorcall(called, args, (size_t)first, all) : NULL;
  Py_XDECREF(all);
  return result;
}

static PyObject *family_call(PyObject *self, PyObject *const *args, size_t nargsf,
                             PyObject *names) {
  family *f = (family *)self;
  request r;
  PyObject *result = NULL;
  const Py_ssize_t n = PyVectorcall_NARGS(nargsf), first = until_none(f, args, n);
  if (first < n) return call_by_name(f, self, args, n, names, first);
  int code = begin(f, &r, args, n, names, false);
  if (!code || (code > 0 && r.c.recorded)) {
    result = pmpy_torch_call(self, args, n, names, code > 0);
    if (result != Py_NotImplemented) {
      end(&r);
      return result;
    }
    Py_CLEAR(result);
  }
  entry *e = code > 0 ? look(f, &r) : NULL;
  if (!code) refuse(f, &r);
  r.c.in_place = f->in_place;
  if (e && e->direct) result = run_direct(&r, e);
  else if (e && pmpy_call_check_overlap(&r.c) == 0) result = call_target(&r, e);
  drop(e);
  end(&r);
  if (!result) pmpy_tidy_error();
  return result;
}

static PyObject *family_kernel(PyObject *self, PyObject *const *args, Py_ssize_t n,
                               PyObject *names) {
  family *f = (family *)self;
  request r;
  const Py_ssize_t first = until_none(f, args, n);
  if (first < n) {
    PyObject *kernel = PyObject_GetAttrString(self, "kernel"), *found = NULL;
    if (kernel) found = call_by_name(f, kernel, args, n, names, first);
    Py_XDECREF(kernel);
    return found;
  }
  int code = begin(f, &r, args, n, names, true);
  entry *e = code > 0 ? look(f, &r) : NULL;
  if (!code) refuse(f, &r);
  PyObject *result = e ? Py_NewRef(e->target) : NULL;
  drop(e);
  end(&r);
  return result;
}

/* ---- the type ----------------------------------------------------------------------------- */

static PyObject *family_new(PyTypeObject *type, PyObject *args, PyObject *kw) {
  static char *names[] = {"name", "make", "parameters", "n_required", "in_place", "improve", NULL};
  PyObject *name, *make, *parameters, *improve = NULL;
  Py_ssize_t n_required;
  int in_place = 1;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "UOO!n|pO:Family", names, &name, &make, &PyTuple_Type,
                                   &parameters, &n_required, &in_place, &improve))
    return NULL;
  family *f = (family *)type->tp_alloc(type, 0);
  if (!f) return NULL;
  f->vectorcall = family_call;
  f->name = Py_NewRef(name);
  f->make = Py_NewRef(make);
  f->improve = Py_XNewRef(improve);
  f->parameters = Py_NewRef(parameters);
  f->n_required = n_required;
  f->in_place = in_place;
  return (PyObject *)f;
}

static int family_traverse(PyObject *self, visitproc visit, void *arg) {
  family *f = (family *)self;
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(f->dict);
  Py_VISIT(f->make);
  Py_VISIT(f->improve);
  for (uint32_t i = 0; i < f->table.capacity; i++) {
    entry *e = (entry *)f->table.at[i];
    if (!e) continue;
    Py_VISIT(e->target);
    for (uint32_t k = 0; k < e->n_values; k++) Py_VISIT(e->values[k]);
  }
  return 0;
}

static void forget_all(family *f) {
  pmpy_table table;
  Py_BEGIN_CRITICAL_SECTION(f);
  table = f->table;
  f->table = (pmpy_table){0};
  Py_END_CRITICAL_SECTION();
  for (uint32_t i = 0; i < table.capacity; i++) drop((entry *)table.at[i]);
  pmpy_table_free(&table);
}

static int family_clear(PyObject *self) {
  family *f = (family *)self;
  forget_all(f);
  Py_CLEAR(f->dict);
  Py_CLEAR(f->make);
  Py_CLEAR(f->improve);
  return 0;
}

static PyObject *family_forget(PyObject *self, PyObject *unused) {
  (void)unused;
  forget_all((family *)self);
  Py_RETURN_NONE;
}

static void family_dealloc(PyObject *self) {
  family *f = (family *)self;
  PyTypeObject *type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  if (f->weakrefs) PyObject_ClearWeakRefs(self);
  family_clear(self);
  Py_XDECREF(f->name);
  Py_XDECREF(f->parameters);
  type->tp_free(self);
  Py_DECREF(type);
}

static PyObject *family_repr(PyObject *self) {
  family *f = (family *)self;
  return PyUnicode_FromFormat("<pallas_mgpu kernel family %U, called in %u ways>", f->name,
                              f->table.n);
}

static PyObject *family_copy(PyObject *self, PyObject *memo) {
  (void)memo;
  return Py_NewRef(self);
}

static PyMethodDef methods[] = {
    {"__reduce__", pmpy_reduce, METH_NOARGS, "By the name that the family has in a module."},
    {"__copy__", family_copy, METH_NOARGS, "The family itself."},
    {"__deepcopy__", family_copy, METH_O, "The family itself."},
    {"forget", family_forget, METH_NOARGS, "Drop all kernels; calls make them anew."},
    {"kernel", (PyCFunction)(void (*)(void))family_kernel, METH_FASTCALL | METH_KEYWORDS,
     "kernel(*args, **kwargs): what a call with such arguments runs, a kernel or a function of the "
     "arrays. They may be arrays or anything with shape and dtype."},
    {NULL, NULL, 0, NULL}};

static PyGetSetDef getset[] = {
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL}};

static PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(family, vectorcall), READONLY, NULL},
    {"__dictoffset__", T_PYSSIZET, offsetof(family, dict), READONLY, NULL},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(family, weakrefs), READONLY, NULL},
    {NULL, 0, 0, 0, NULL}};

static PyType_Slot slots[] = {{Py_tp_new, family_new},
                              {Py_tp_dealloc, family_dealloc},
                              {Py_tp_traverse, family_traverse},
                              {Py_tp_clear, family_clear},
                              {Py_tp_call, PyVectorcall_Call},
                              {Py_tp_repr, family_repr},
                              {Py_tp_methods, methods},
                              {Py_tp_getset, getset},
                              {Py_tp_members, members},
                              {Py_tp_doc, "Kernels by the types of arrays and values of options."},
                              {0, NULL}};

static PyType_Spec type_spec = {.name = "pallas_mgpu.Family",
                                .basicsize = sizeof(family),
                                .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC |
                                         Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_IMMUTABLETYPE,
                                .slots = slots};

int pmpy_init_family(PyObject *module) {
  PyObject *type = PyType_FromModuleAndSpec(module, &type_spec, NULL);
  call_names[1] = Py_BuildValue("(s)", "out");
  call_names[2] = Py_BuildValue("(s)", "stream");
  call_names[3] = Py_BuildValue("(ss)", "out", "stream");
  const bool ok = type && call_names[1] && call_names[2] && call_names[3];
  int code = ok ? PyModule_AddObjectRef(module, "Family", type) : -1;
  Py_XDECREF(type);
  return code;
}
