/* Array: a traced value in registers. Operators and functions add ops to the current trace. The
 * methods of arrays are functions of the package (pallas_mgpu/_jnp/members.py).
 *
 * Anything that needs the value while tracing (bool, int, iteration over a scalar, NumPy) raises
 * the same exception as in JAX. Shape functions return their operand where nothing changes. */
#include "trace.h"

#include <structmember.h>

static pmpy_traced *self_of(PyObject *o) { return (pmpy_traced *)o; }

static PyObject *result(pmpy_trace *t, pm_val v, bool weak) {
  return v ? pmpy_traced_new(t, v, weak) : NULL;
}

static void array_dealloc(PyObject *self) {
  PyTypeObject *type = Py_TYPE(self);
  Py_DECREF(self_of(self)->trace);
  PyObject_Free(self);
  Py_DECREF(type);
}

/* ---- shape operations ---------------------------------------------------------------------- */

/* Operand `o` in the graph with its own dtype. */
static pmpy_trace *begin_value(const char *name, PyObject *o, pmpy_arg *x) {
  pmpy_trace *t = pmpy_begin(name, o);
  if (!t || pmpy_arg_need(t, name, o, x) || !pmpy_arg_as(t, x, x->type.dtype)) return NULL;
  return t;
}

static bool same_shape(const pm_type *a, const pm_type *b) {
  return a->rank == b->rank && !memcmp(a->dim, b->dim, sizeof(int64_t) * a->rank);
}

static PyObject *to_shape(pmpy_trace *t, const pmpy_arg *x, const pm_type *to) {
  return result(t, pmpy_reshape(t, x->val, to), x->weak);
}

/* Axes as a set of dims: None is all; negative ones wrap. */
static int axis_set(const char *name, PyObject *axes, int rank, uint32_t *set) {
  int64_t axis[PM_MAX_RANK];
  *set = 0;
  if (!axes || axes == Py_None) {
    *set = (1u << rank) - 1;
    return 0;
  }
  int n = pmpy_ints(axes, name, axis, PM_MAX_RANK);
  if (n < 0) return -1;
  for (int k = 0; k < n; k++) {
    int64_t d = axis[k] < 0 ? axis[k] + rank : axis[k];
    if (d < 0 || d >= rank) {
      pmpy_fail(PM_E_VALUE, "%s: axis %lld is out of bounds for an array of rank %d", name,
                (long long)axis[k], rank);
      return -1;
    }
    if (*set & 1u << d) {
      pmpy_fail(PM_E_VALUE, "%s: axis %lld is given twice", name, (long long)axis[k]);
      return -1;
    }
    *set |= 1u << d;
  }
  return 0;
}

static pm_type without(const pm_type *type, uint32_t set) {
  pm_type to = *type;
  to.rank = 0;
  memset(to.dim, 0, sizeof to.dim);
  for (int k = 0; k < type->rank; k++) {
    if (!(set & 1u << k)) to.dim[to.rank++] = type->dim[k];
  }
  return to;
}

/* ---- reductions ---------------------------------------------------------------------------- */

static pm_dtype sum_dtype(pm_dtype d) {
  if (pm_is_float(d)) return PM_F32;
  if (pm_dtypes[d].bits < 8) return d;
  return pm_dtypes[d].class == PM_CLASS_UINT ? PM_U32 : PM_I32;
}

/* Over the dims of `set`; keepdims brings them back as unit dims. Replaces *x. */
static int reduce_over(pmpy_trace *t, pmpy_arg *x, int op, uint32_t set, bool keepdims) {
  int64_t dims[PM_MAX_RANK];
  uint32_t n = 0;
  for (int k = 0; k < x->type.rank; k++) {
    if (set & 1u << k) dims[n++] = k;
  }
  if (!n) return 0;
  pm_attr_arg attrs[] = {{.id = PM_ATTR_REDUCE, .i = op},
                         {.id = PM_ATTR_DIMS, .list = dims, .n = n}};
  pm_type kept = x->type, to = without(&x->type, set);
  x->val = pmpy_emit(t, PM_OP_REDUCE, &x->val, 1, NULL, attrs, 2);
  x->type = to;
  if (!x->val || !keepdims) return x->val ? 0 : -1;
  for (uint32_t k = 0; k < n; k++) kept.dim[dims[k]] = 1;
  x->val = pmpy_reshape(t, x->val, &kept);
  x->type = kept;
  return x->val ? 0 : -1;
}

static PyObject *reduce_value(pmpy_trace *t, const char *name, pmpy_arg *x, int op, bool upcast,
                              PyObject *axes, bool keepdims) {
  pm_dtype d = x->type.dtype, wide = upcast || pm_is_small_float(d) ? sum_dtype(d) : d;
  const bool logical = op == PM_REDUCE_ANY || op == PM_REDUCE_ALL;
  uint32_t set;
  if (axis_set(name, axes, x->type.rank, &set)) return NULL;
  if (pm_dtypes[d].bits < 8 && !logical) {
    return pmpy_fail(PM_E_NOT_IMPLEMENTED, "%s of %s; convert it first: x.astype(jnp.int32)", name,
                     pmpy_type_text(&x->type));
  }
  if (logical) d = wide = PM_BOOL;
  if (d == PM_BOOL && (op == PM_REDUCE_MAX || op == PM_REDUCE_MIN)) {
    return pmpy_fail(PM_E_NOT_IMPLEMENTED, "%s: bool arrays; convert first: x.astype(jnp.int32)",
                     name);
  }
  if (!pmpy_arg_as(t, x, wide) || reduce_over(t, x, op, set, keepdims)) return NULL;
  return result(t, pmpy_arg_as(t, x, pm_is_float(d) ? d : wide), false);
}

/* ---- bits ---------------------------------------------------------------------------------- */

static pm_val retyped(pmpy_trace *t, pm_opcode code, pm_val x, pm_dtype d) {
  pm_type to = *pm_typeof(t->g, x);
  to.dtype = (uint8_t)d;
  return pmpy_emit(t, code, &x, 1, &to, NULL, 0);
}

static pm_dtype without_sign(pm_dtype d) {
  const bool small = pm_is_small_int(d) && pm_dtypes[d].class == PM_CLASS_INT;
  return small ? pm_dtype_of(PM_CLASS_UINT, pm_dtypes[d].bits) : d;
}

/* int4 and int2 lie sign-extended in registers, so their bits are those of the uint4 and uint2 that
 * they convert to. */
static PyObject *bits_as(pmpy_trace *t, const pmpy_arg *x, pm_dtype d) {
  if (x->type.dtype == d) return result(t, x->val, false);
  if (pm_dtypes[x->type.dtype].bits != pm_dtypes[d].bits) {
    return pmpy_fail(PM_E_NOT_IMPLEMENTED, "bitcast between different widths: %s to %s",
                     pmpy_type_text(&x->type), pm_dtypes[d].text);
  }
  pm_val v = x->val;
  const pm_dtype from = without_sign(x->type.dtype), to = without_sign(d);
  if (x->type.dtype != from) v = retyped(t, PM_OP_CONVERT, v, from);
  if (v && from != to) v = retyped(t, PM_OP_BITCAST, v, to);
  if (v && d != to) v = retyped(t, PM_OP_CONVERT, v, d);
  return result(t, v, false);
}

/* ---- what a traced value cannot do --------------------------------------------------------- */

static int array_bool(PyObject *self) {
  pmpy_tracer_fail(PMPY_BOOL_CONVERSION,
                   "Attempted boolean conversion of traced array with shape %s: its value is known "
                   "only when the "
                   "kernel runs. Use pl.when, lax.cond or jnp.where instead of if, and & | ~ "
                   "instead of and, or, not",
                   pmpy_type_text(&self_of(self)->type));
  return -1;
}

static PyObject *array_int(PyObject *self) {
  return pmpy_tracer_fail(
      PMPY_CONCRETIZATION,
      "A traced array with shape %s has no Python number: its value is known only when the "
      "kernel runs. Use x.astype(...) for a conversion inside the kernel",
      pmpy_type_text(&self_of(self)->type));
}

static PyObject *array_index(PyObject *self) {
  return pmpy_tracer_fail(
      PMPY_INTEGER_CONVERSION,
      "A traced array with shape %s cannot be used as a Python int (a shape, a list index, a "
      "range): its value is known only when the kernel runs",
      pmpy_type_text(&self_of(self)->type));
}

static Py_ssize_t array_length(PyObject *self) {
  const pmpy_traced *x = self_of(self);
  if (x->type.rank) return (Py_ssize_t)x->type.dim[0];
  pmpy_fail(PM_E_TYPE, "len() of a 0-d array");
  return -1;
}

static PyObject *array_iter(PyObject *self) {
  const pmpy_traced *x = self_of(self);
  enum { MOST = 1024 };
  if (!x->type.rank) return pmpy_fail(PM_E_TYPE, "iteration over a 0-d array");
  const int64_t n = x->type.dim[0];
  if (n > MOST) {
    return pmpy_fail(PM_E_NOT_IMPLEMENTED,
                     "iteration over a traced array (%s) makes code for each of its rows, at most "
                     "%d; use pl.loop and index the ref",
                     pmpy_type_text(&x->type), MOST);
  }
  PyObject *rows = PyTuple_New((Py_ssize_t)n);
  for (int64_t k = 0; rows && k < n; k++) {
    PyObject *index = PyLong_FromLongLong(k);
    PyObject *row = index ? PyObject_GetItem(self, index) : NULL;
    Py_XDECREF(index);
    if (row) {
      PyTuple_SET_ITEM(rows, (Py_ssize_t)k, row);
    } else {
      Py_CLEAR(rows);
    }
  }
  PyObject *iter = rows ? PyObject_GetIter(rows) : NULL;
  Py_XDECREF(rows);
  return iter;
}

static int array_assign(PyObject *self, PyObject *idx, PyObject *value) {
  (void)idx, (void)value;
  pmpy_fail(
      PM_E_TYPE,
      "a traced array (%s) is immutable: assign to a ref, or use x = x.at[idx].set(y) or jnp.where "
      "instead of x[idx] = y",
      pmpy_type_text(&self_of(self)->type));
  return -1;
}

/* ---- indexing ------------------------------------------------------------------------------ */

/* A pl.ds of known start and unit stride; or what is no index at all, which the parser refuses. */
static bool is_static_slice(PyObject *o) {
  PyObject *start = PyObject_GetAttrString(o, "start"), *stride = NULL;
  if (start) stride = PyObject_GetAttrString(o, "stride");
  const bool is =
      !stride || (!PMPY_IS_ARRAY(start) && PyLong_Check(stride) && PyLong_AsLong(stride) == 1);
  Py_XDECREF(start);
  Py_XDECREF(stride);
  PyErr_Clear();
  return is;
}

/* Ints, slices of unit stride, None and ...: what SLICE and RESHAPE do. */
static bool is_plain_part(PyObject *o) {
  if (PySlice_Check(o)) {
    PySliceObject *s = (PySliceObject *)o;
    const bool unit = s->step == Py_None || (PyLong_Check(s->step) && PyLong_AsLong(s->step) == 1);
    PyErr_Clear();
    return unit;
  }
  const bool host_array = PySequence_Check(o) && PyIndex_Check(o);
  if (PMPY_IS_ARRAY(o) || PyList_Check(o) || host_array) return false;
  return o == Py_None || o == Py_Ellipsis || PyIndex_Check(o) || is_static_slice(o);
}

static bool is_plain_index(PyObject *idx) {
  if (!PyTuple_Check(idx)) return is_plain_part(idx);
  for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(idx); k++) {
    if (!is_plain_part(PyTuple_GET_ITEM(idx, k))) return false;
  }
  return true;
}

static PyObject *subscript_by_gather(PyObject *self, PyObject *idx) {
  PyObject *hook = pmpy_hook(PMPY_HOOK_INDEX_ARRAY);
  return hook ? PyObject_CallFunctionObjArgs(hook, self, idx, NULL) : NULL;
}

static PyObject *array_subscript(PyObject *self, PyObject *idx) {
  if (!is_plain_index(idx)) return subscript_by_gather(self, idx);
  pmpy_arg x;
  pmpy_index index;
  pmpy_trace *t = begin_value("index", self, &x);
  if (!t || pmpy_parse_index(t, idx, &x.type, true, &index)) return NULL;
  int64_t size[PM_MAX_RANK];
  pm_type cut = x.type, to;
  if (pmpy_indexed_type(&index, &x.type, &to)) return NULL;
  for (int k = 0; k < x.type.rank; k++) {
    cut.dim[k] = size[k] = index.size[k] == PM_DROPPED ? 1 : index.size[k];
  }
  if (!same_shape(&cut, &x.type)) {
    pm_attr_arg attrs[] = {{.id = PM_ATTR_STARTS, .list = index.start, .n = x.type.rank},
                           {.id = PM_ATTR_SIZES, .list = size, .n = x.type.rank}};
    x.val = pmpy_emit(t, PM_OP_SLICE, &x.val, 1, NULL, attrs, 2);
    if (!x.val) return NULL;
    x.type = cut;
  }
  return to_shape(t, &x, &to);
}

/* ---- operators ----------------------------------------------------------------------------- */

#define OPERATOR(fn, how, code, name)                               \
  static PyObject *fn(PyObject *x, PyObject *y) {                   \
    return pmpy_binary(PMPY_##how, PM_OP_##code, name, x, y, true); \
  }
OPERATOR(op_add, SIMPLE, ADD, "add")
OPERATOR(op_sub, SIMPLE, SUB, "sub")
OPERATOR(op_mul, SIMPLE, MUL, "mul")
OPERATOR(op_div, TRUE_DIVIDE, DIV, "true_divide")
OPERATOR(op_floordiv, FLOOR_DIVIDE, DIV, "floor_divide")
OPERATOR(op_mod, MOD, REM, "remainder")
OPERATOR(op_and, SIMPLE, AND, "and")
OPERATOR(op_or, SIMPLE, OR, "or")
OPERATOR(op_xor, SIMPLE, XOR, "xor")
OPERATOR(op_shl, SIMPLE, SHL, "shl")
OPERATOR(op_shr, SIMPLE, SHR, "shr")

static PyObject *op_pow(PyObject *x, PyObject *y, PyObject *modulus) {
  if (modulus != Py_None) Py_RETURN_NOTIMPLEMENTED;
  return pmpy_binary(PMPY_POW, PM_OP_MUL, "power", x, y, true);
}

static PyObject *op_divmod(PyObject *x, PyObject *y) {
  PyObject *q = op_floordiv(x, y);
  if (!q || q == Py_NotImplemented) return q;
  PyObject *r = op_mod(x, y);
  return r ? Py_BuildValue("(NN)", q, r) : (Py_DECREF(q), NULL);
}

static PyObject *op_neg(PyObject *x) { return pmpy_unary(PM_OP_NEG, x); }
static PyObject *op_abs(PyObject *x) { return pmpy_unary(PM_OP_ABS, x); }
static PyObject *op_not(PyObject *x) { return pmpy_unary(PM_OP_NOT, x); }
static PyObject *op_pos(PyObject *x) { return Py_NewRef(x); }

static PyObject *array_compare(PyObject *x, PyObject *y, int op) {
  static const struct {
    const char *name;
    uint8_t code;
  } ops[] = {[Py_LT] = {"lt", PM_OP_LT}, [Py_LE] = {"le", PM_OP_LE}, [Py_EQ] = {"eq", PM_OP_EQ},
             [Py_NE] = {"ne", PM_OP_NE}, [Py_GT] = {"gt", PM_OP_GT}, [Py_GE] = {"ge", PM_OP_GE}};
  return pmpy_binary(PMPY_COMPARE, ops[op].code, ops[op].name, x, y, true);
}

/* ---- attributes ---------------------------------------------------------------------------- */

static PyObject *get_shape(PyObject *self, void *c) {
  (void)c;
  return pmpy_shape_tuple(&self_of(self)->type);
}

static PyObject *get_dtype(PyObject *self, void *c) {
  (void)c;
  return pmpy_dtype_object(self_of(self)->type.dtype);
}

static PyObject *get_ndim(PyObject *self, void *c) {
  (void)c;
  return PyLong_FromLong(self_of(self)->type.rank);
}

static PyObject *get_size(PyObject *self, void *c) {
  (void)c;
  return PyLong_FromLongLong(pm_type_size(&self_of(self)->type));
}

static PyObject *get_itemsize(PyObject *self, void *c) {
  (void)c;
  return PyLong_FromLong(pm_dtypes[self_of(self)->type.dtype].bytes);
}

static PyObject *get_nbytes(PyObject *self, void *c) {
  const pm_type *type = &self_of(self)->type;
  (void)c;
  return PyLong_FromLongLong(pm_type_size(type) * pm_dtypes[type->dtype].bytes);
}

static PyObject *get_weak(PyObject *self, void *c) {
  (void)c;
  return PyBool_FromLong(self_of(self)->weak);
}

static PyObject *get_priority(PyObject *self, void *c) {
  (void)self, (void)c;
  return PyLong_FromLong(100);
}

static PyObject *array_repr(PyObject *self) {
  const pmpy_traced *x = self_of(self);
  return PyUnicode_FromFormat("Traced<%s%s>", pmpy_type_text(&x->type), x->weak ? ", weak" : "");
}

static PyGetSetDef array_getset[] = {
    {"shape", get_shape, NULL, "Tuple of ints.", NULL},
    {"dtype", get_dtype, NULL, "NumPy dtype.", NULL},
    {"ndim", get_ndim, NULL, "Number of dimensions.", NULL},
    {"size", get_size, NULL, "Number of elements.", NULL},
    {"itemsize", get_itemsize, NULL, "Bytes of an element.", NULL},
    {"nbytes", get_nbytes, NULL, "Bytes of all elements.", NULL},
    {"weak_type", get_weak, NULL, "Does the dtype give way in promotion?", NULL},
    {"__array_priority__", get_priority, NULL, "NumPy scalars on the left give way.", NULL},
    {NULL, NULL, NULL, NULL, NULL}};

#define KEYWORDS(fn) (PyCFunction)(void (*)(void)) fn, METH_VARARGS | METH_KEYWORDS
static PyType_Slot array_slots[] = {
    {Py_tp_dealloc, array_dealloc},
    {Py_tp_repr, array_repr},
    {Py_tp_hash, PyObject_HashNotImplemented},
    {Py_tp_richcompare, array_compare},
    {Py_tp_iter, array_iter},
    {Py_tp_getset, array_getset},
    {Py_tp_doc, "A value of a kernel being traced, in the registers of one thread."},
    {Py_mp_length, array_length},
    {Py_mp_subscript, array_subscript},
    {Py_mp_ass_subscript, array_assign},
    {Py_nb_add, op_add},
    {Py_nb_subtract, op_sub},
    {Py_nb_multiply, op_mul},
    {Py_nb_true_divide, op_div},
    {Py_nb_floor_divide, op_floordiv},
    {Py_nb_remainder, op_mod},
    {Py_nb_divmod, op_divmod},
    {Py_nb_power, op_pow},
    {Py_nb_lshift, op_shl},
    {Py_nb_rshift, op_shr},
    {Py_nb_and, op_and},
    {Py_nb_or, op_or},
    {Py_nb_xor, op_xor},
    {Py_nb_negative, op_neg},
    {Py_nb_positive, op_pos},
    {Py_nb_absolute, op_abs},
    {Py_nb_invert, op_not},
    {Py_nb_bool, array_bool},
    {Py_nb_int, array_int},
    {Py_nb_float, array_int},
    {Py_nb_index, array_index},
    {0, NULL}};
static PyType_Spec array_spec = {"pallas_mgpu._core.Array", sizeof(pmpy_traced), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                                 array_slots};

/* ---- functions ----------------------------------------------------------------------------- */

static PyObject *full(PyObject *module, PyObject *args, PyObject *kw) {
  static char *names[] = {"shape", "value", "dtype", NULL};
  (void)module;
  PyObject *shape, *value, *dtype = Py_None;
  pm_type type = pm_scalar_type(PM_BOOL);
  pmpy_arg x;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "OO|O:full", names, &shape, &value, &dtype))
    return NULL;
  pmpy_trace *t = pmpy_begin("full", value);
  if (!t || pmpy_shape(shape, "full", &type)) return NULL;
  pm_dtype d = PM_BOOL;
  if (dtype != Py_None) {
    if (pmpy_dtype_from(dtype, &d) || pmpy_arg_for(t, "full", value, d, &x)) return NULL;
    x.weak = false;
  } else {
    if (pmpy_arg_need(t, "full", value, &x)) return NULL;
    d = x.type.dtype;
  }
  bool weak = x.weak;
  if (!x.val) {
    /* one op: the number itself has the shape */
    for (int k = 0; k < type.rank; k++) x.type.dim[k] = type.dim[k];
    x.type.rank = type.rank;
    return result(t, pmpy_arg_as(t, &x, d), weak);
  }
  if (!pmpy_arg_as(t, &x, d)) return NULL;
  type.dtype = (uint8_t)d;
  if (same_shape(&x.type, &type)) return result(t, x.val, weak);
  if (x.type.rank) {
    return pmpy_fail(PM_E_VALUE, "full: the value must be a scalar, got %s",
                     pmpy_type_text(&x.type));
  }
  pm_attr_arg attr = {.id = PM_ATTR_DIMS};
  return result(t, pmpy_emit(t, PM_OP_BROADCAST, &x.val, 1, &type, &attr, 1), weak);
}

static PyObject *iota(PyObject *module, PyObject *args, PyObject *kw) {
  static char *names[] = {"dtype", "shape", "dim", "layout", NULL};
  (void)module;
  PyObject *dtype, *shape, *along, *layout = Py_None;
  int64_t dim;
  pm_dtype d;
  pm_type type = pm_scalar_type(PM_BOOL);
  if (!PyArg_ParseTupleAndKeywords(args, kw, "OOO|O:iota", names, &dtype, &shape, &along,
                                   &layout) ||
      pmpy_dtype_from(dtype, &d)) {
    return NULL;
  }
  if (!PyIndex_Check(along)) return pmpy_fail(PM_E_TYPE, "iota: dimension must be an int");
  if (pmpy_ints(along, "iota: dimension", &dim, 1) != 1) return NULL;
  pmpy_trace *t = pmpy_begin("iota", NULL);
  if (!t || pmpy_shape(shape, "iota", &type)) return NULL;
  type.dtype = (uint8_t)d;
  if (dim < 0 || dim >= type.rank) {
    return pmpy_fail(PM_E_VALUE, "iota: dimension %lld is out of bounds for %s", (long long)dim,
                     pmpy_type_text(&type));
  }
  pm_attr_arg attrs[] = {{.id = PM_ATTR_DIM, .i = dim}, {.id = PM_ATTR_LAYOUT}};
  if (layout != Py_None) {
    attrs[1].i = pmpy_layout(t, layout, &type);
    if (!attrs[1].i) return NULL;
  }
  return result(t, pmpy_emit(t, PM_OP_IOTA, NULL, 0, &type, attrs, 2), false);
}

static PyObject *broadcast_in_dim(PyObject *module, PyObject *args, PyObject *kw) {
  static char *names[] = {"x", "shape", "dims", NULL};
  (void)module;
  PyObject *o, *shape, *dims;
  pmpy_arg x;
  int64_t dim[PM_MAX_RANK], kept_dim[PM_MAX_RANK];
  if (!PyArg_ParseTupleAndKeywords(args, kw, "OOO:broadcast_in_dim", names, &o, &shape, &dims))
    return NULL;
  pmpy_trace *t = begin_value("broadcast_in_dim", o, &x);
  if (!t) return NULL;
  pm_type to = x.type, kept = x.type;
  memset(to.dim, 0, sizeof to.dim);
  memset(kept.dim, 0, sizeof kept.dim);
  if (pmpy_shape(shape, "broadcast_in_dim", &to)) return NULL;
  int n = pmpy_ints(dims, "broadcast_in_dim", dim, PM_MAX_RANK);
  if (n < 0) return NULL;
  if (n != x.type.rank) {
    return pmpy_fail(PM_E_TYPE, "broadcast_in_dim: %d broadcast_dimensions for %s", n,
                     pmpy_type_text(&x.type));
  }
  kept.rank = 0;
  for (int k = 0; k < n; k++) {
    if (dim[k] < 0 || dim[k] >= to.rank) {
      return pmpy_fail(PM_E_TYPE, "broadcast_in_dim: dimension %lld is out of bounds for rank %d",
                       (long long)dim[k], to.rank);
    }
    if (k && dim[k] <= dim[k - 1]) {
      return pmpy_fail(PM_E_NOT_IMPLEMENTED,
                       "broadcast_in_dim: broadcast_dimensions must increase strictly");
    }
    if (x.type.dim[k] == to.dim[dim[k]]) {
      kept_dim[kept.rank] = dim[k];
      kept.dim[kept.rank++] = x.type.dim[k];
    } else if (x.type.dim[k] != 1) {
      return pmpy_fail(PM_E_TYPE, "broadcast_in_dim: dimension %d of %s is neither 1 nor %lld", k,
                       pmpy_type_text(&x.type), (long long)to.dim[dim[k]]);
    }
  }
  if (kept.rank == to.rank) return to_shape(t, &x, &to);
  if (kept.rank != x.type.rank) {
    x.val = pmpy_reshape(t, x.val, &kept);
    if (!x.val) return NULL;
  }
  pm_attr_arg attr = {.id = PM_ATTR_DIMS, .list = kept_dim, .n = kept.rank};
  return result(t, pmpy_emit(t, PM_OP_BROADCAST, &x.val, 1, &to, &attr, 1), x.weak);
}

static PyObject *reshape(PyObject *module, PyObject *const *args, Py_ssize_t n) {
  (void)module;
  pmpy_arg x;
  pm_type to;
  if (n != 2) return pmpy_fail(PM_E_TYPE, "reshape: expected x and shape, got %zd arguments", n);
  pmpy_trace *t = begin_value("reshape", args[0], &x);
  if (!t || pmpy_reshape_args(&x.type, args + 1, 1, PM_E_TYPE, &to)) return NULL;
  return to_shape(t, &x, &to);
}

static PyObject *slice_array(PyObject *module, PyObject *const *args, Py_ssize_t n) {
  (void)module;
  pmpy_arg x;
  int64_t start[PM_MAX_RANK], size[PM_MAX_RANK];
  if (n != 3) return pmpy_fail(PM_E_TYPE, "slice_array: expected x, starts and sizes");
  pmpy_trace *t = begin_value("slice", args[0], &x);
  if (!t) return NULL;
  int n_start = pmpy_ints(args[1], "slice starts", start, PM_MAX_RANK);
  int n_size = n_start < 0 ? -1 : pmpy_ints(args[2], "slice sizes", size, PM_MAX_RANK);
  if (n_size < 0) return NULL;
  pm_attr_arg attrs[] = {{.id = PM_ATTR_STARTS, .list = start, .n = (uint32_t)n_start},
                         {.id = PM_ATTR_SIZES, .list = size, .n = (uint32_t)n_size}};
  if (n_size == x.type.rank && !memcmp(size, x.type.dim, sizeof(int64_t) * (size_t)n_size)) {
    bool all = n_start == n_size;
    for (int k = 0; k < n_start; k++) all &= !start[k];
    if (all) return result(t, x.val, x.weak);
  }
  return result(t, pmpy_emit(t, PM_OP_SLICE, &x.val, 1, NULL, attrs, 2), x.weak);
}

static PyObject *reduce(PyObject *module, PyObject *args, PyObject *kw) {
  static char *names[] = {"kind", "x", "axes", "keepdims", NULL};
  (void)module;
  const char *kind;
  PyObject *o, *axes = Py_None;
  int keepdims = 0;
  pmpy_arg x;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "sO|Op:reduce", names, &kind, &o, &axes, &keepdims))
    return NULL;
  const bool upcast = !strcmp(kind, "sum"); /* an "add" of narrow integers in 32 bits */
  int64_t op;
  if (pmpy_enum_value(PM_ATTR_REDUCE, upcast ? "add" : kind, &op)) return NULL;
  pmpy_trace *t = begin_value(kind, o, &x);
  return t ? reduce_value(t, kind, &x, (int)op, upcast, axes, keepdims) : NULL;
}

static PyObject *layout_cast(PyObject *module, PyObject *const *args, Py_ssize_t n) {
  (void)module;
  pmpy_arg x;
  if (n != 2) return pmpy_fail(PM_E_TYPE, "layout_cast: expected x and a layout");
  pmpy_trace *t = begin_value("layout_cast", args[0], &x);
  if (!t) return NULL;
  pm_attr_arg attr = {.id = PM_ATTR_LAYOUT, .i = pmpy_layout(t, args[1], &x.type)};
  if (!attr.i) return NULL;
  return result(t, pmpy_emit(t, PM_OP_LAYOUT_CAST, &x.val, 1, NULL, &attr, 1), x.weak);
}

static PyObject *multiple_of(PyObject *module, PyObject *const *args, Py_ssize_t n) {
  (void)module;
  int64_t values[PM_MAX_RANK], multiple = 1;
  pmpy_arg x;
  if (n != 2) return pmpy_fail(PM_E_TYPE, "multiple_of: expected x and values");
  int count = pmpy_ints(args[1], "multiple_of", values, PM_MAX_RANK);
  if (count < 0) return NULL;
  for (int k = 0; k < count; k++) {
    if (values[k] < 1 || values[k] > INT32_MAX) {
      return pmpy_fail(PM_E_VALUE, "multiple_of: %lld, it must be at least 1",
                       (long long)values[k]);
    }
    multiple *= values[k] / pm_gcd(multiple, values[k]);
    if (multiple > INT32_MAX)
      return pmpy_fail(PM_E_VALUE, "multiple_of: the values have no common multiple below 2**31");
  }
  if (PyLong_Check(args[0])) {
    int64_t number;
    if (pmpy_ints(args[0], "multiple_of", &number, 1) != 1) return NULL;
    if (number % multiple) {
      return pmpy_fail(PM_E_VALUE, "multiple_of: %lld is not a multiple of %lld", (long long)number,
                       (long long)multiple);
    }
    return Py_NewRef(args[0]);
  }
  pmpy_trace *t = begin_value("multiple_of", args[0], &x);
  if (!t) return NULL;
  pm_attr_arg attr = {.id = PM_ATTR_MULTIPLE, .i = multiple};
  return result(t, pmpy_emit(t, PM_OP_MULTIPLE_OF, &x.val, 1, NULL, &attr, 1), x.weak);
}

static PyObject *opt_barrier(PyObject *module, PyObject *o) {
  (void)module;
  pmpy_arg x;
  pmpy_trace *t = begin_value("optimization_barrier", o, &x);
  return t ? result(t, pmpy_emit(t, PM_OP_OPT_BARRIER, &x.val, 1, NULL, NULL, 0), x.weak) : NULL;
}

static PyObject *shuffle_tile(PyObject *module, PyObject *o) {
  (void)module;
  pmpy_arg x;
  pmpy_trace *t = begin_value("shuffle_tile", o, &x);
  return t ? result(t, pmpy_emit(t, PM_OP_SHUFFLE_TILE, &x.val, 1, NULL, NULL, 0), x.weak) : NULL;
}

static PyObject *bitcast(PyObject *module, PyObject *const *args, Py_ssize_t n) {
  (void)module;
  pmpy_arg x;
  pm_dtype d;
  if (n != 2) return pmpy_fail(PM_E_TYPE, "bitcast: expected x and dtype");
  if (pmpy_dtype_from(args[1], &d)) return NULL;
  pmpy_trace *t = begin_value("bitcast", args[0], &x);
  return t ? bits_as(t, &x, d) : NULL;
}

static PyMethodDef functions[] = {
    {"full", KEYWORDS(full), "full(shape, value, dtype=None) -> Array"},
    {"iota", KEYWORDS(iota), "iota(dtype, shape, dim, layout=None) -> Array"},
    {"broadcast_in_dim", KEYWORDS(broadcast_in_dim), "broadcast_in_dim(x, shape, dims) -> Array"},
    {"reshape", (PyCFunction)(void (*)(void))reshape, METH_FASTCALL, "reshape(x, shape) -> Array"},
    {"slice_array", (PyCFunction)(void (*)(void))slice_array, METH_FASTCALL,
     "slice_array(x, starts, sizes) -> Array"},
    {"reduce", KEYWORDS(reduce),
     "reduce(kind, x, axes=None, keepdims=False) -> Array; kind is sum, add "
     "(without upcast), mul, max or min"},
    {"layout_cast", (PyCFunction)(void (*)(void))layout_cast, METH_FASTCALL,
     "layout_cast(x, layout) -> Array"},
    {"multiple_of", (PyCFunction)(void (*)(void))multiple_of, METH_FASTCALL,
     "multiple_of(x, values)"},
    {"opt_barrier", opt_barrier, METH_O, "opt_barrier(x) -> Array"},
    {"shuffle_tile", shuffle_tile, METH_O,
     "shuffle_tile(taken): the number of fetch_tile, for everyone."},
    {"bitcast", (PyCFunction)(void (*)(void))bitcast, METH_FASTCALL, "bitcast(x, dtype) -> Array"},
    {NULL, NULL, 0, NULL}};

int pmpy_init_array(PyObject *module) {
  pmpy.array_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &array_spec, NULL);
  if (!pmpy.array_type || PyModule_AddType(module, pmpy.array_type)) return -1;
  return PyModule_AddFunctions(module, functions);
}
