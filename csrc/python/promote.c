/* Numbers and promotion: what a Python operand is, to which dtype several of them are promoted, and
 * the operators that are more than one op.
 *
 * The lattice has a node for each (strong) dtype and for weak int and weak float, which become
 * int32 and float32 values. Promotion is the join of all operands. Integers below 8 bits and floats
 * below 16 bits are not promoted to other dtypes: they only combine with bool and weak numbers,
 * small floats also with all integers. A Python or NumPy number stays a number until the joint
 * dtype is known, and is rounded once, to that dtype.
 *
 * Floor division and modulo are composed of DIV, REM and SELECT. If the operands are provably
 * non-negative, they are a single op, and for a power of two as divisor a shift or a mask. */
#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include "trace.h"

#include <math.h>
#include <numpy/arrayobject.h>

/* ---- the lattice --------------------------------------------------------------------------- */

enum { WI = PM_DTYPE_COUNT, WF, NO_WAY = 255 };

static bool is_bool(uint8_t node) { return node < WI && pm_dtypes[node].class == PM_CLASS_BOOL; }
static bool is_float(uint8_t node) { return node == WF || (node < WI && pm_is_float(node)); }

static bool is_small(uint8_t node) {
  return node < WI && (pm_is_small_int(node) || pm_is_small_float(node));
}

/* Of integers the wider one; a signed one that holds both, or int32. */
static uint8_t join_ints(uint8_t x, uint8_t y) {
  const int a = pm_dtypes[x].bits, b = pm_dtypes[y].bits;
  if (pm_dtypes[x].class == pm_dtypes[y].class) return a < b ? y : x;
  const bool first = pm_dtypes[x].class == PM_CLASS_INT;
  const int is_signed = first ? a : b, is_unsigned = first ? b : a;
  const int bits = is_signed > is_unsigned ? is_signed : 2 * is_unsigned;
  return (uint8_t)pm_dtype_of(PM_CLASS_INT, bits < 32 ? bits : 32);
}

/* Bool, integers, weak float, floats: the later kind; weak int is the least integer. */
static uint8_t join_nodes(uint8_t x, uint8_t y) {
  if (x == y || is_bool(y)) return x;
  if (is_bool(x)) return y;
  if (is_small(x) || is_small(y)) {
    const uint8_t small = is_small(x) ? x : y, other = is_small(x) ? y : x;
    if (is_small(other)) return NO_WAY;
    if (other == WI) return small;
    return pm_is_float(small) && (other == WF || !is_float(other)) ? small : NO_WAY;
  }
  if (is_float(x) != is_float(y)) return is_float(x) ? x : y;
  if (x >= WI || y >= WI) return x >= WI ? y : x; /* of one kind, weak */
  return is_float(x) ? PM_F32 : join_ints(x, y);
}

static int no_way(uint8_t x, uint8_t y) {
  const char *name[2];
  const uint8_t node[2] = {x, y};
  for (int k = 0; k < 2; k++)
    name[k] = node[k] < WI ? pm_dtypes[node[k]].text : node[k] == WI ? "a Python int" : "a float";
  pmpy_fail(PM_E_PROMOTION,
            "Input dtypes %s and %s have no available implicit dtype promotion path; convert one "
            "of them with x.astype(...)",
            name[0], name[1]);
  return -1;
}

static uint8_t node_of(pm_dtype d, bool weak) {
  if (!weak || is_bool((uint8_t)d)) return (uint8_t)d;
  return pm_is_float(d) ? WF : WI;
}

static pm_dtype dtype_of(uint8_t node) {
  return node == WI ? PM_I32 : node == WF ? PM_F32 : (pm_dtype)node;
}

int pmpy_promote(const pmpy_arg *args, uint32_t n, pm_dtype *dtype, bool *weak) {
  uint8_t node = node_of(args[0].type.dtype, args[0].weak);
  for (uint32_t k = 1; k < n; k++) {
    const uint8_t next = node_of(args[k].type.dtype, args[k].weak), both = join_nodes(node, next);
    if (both == NO_WAY) return no_way(node, next);
    node = both;
  }
  *dtype = dtype_of(node);
  *weak = node >= WI;
  return 0;
}

/* ---- operands ------------------------------------------------------------------------------ */

static int python_int(PyObject *o, pmpy_arg *out) {
  int overflow;
  long long v = PyLong_AsLongLongAndOverflow(o, &overflow);
  if (v == -1 && PyErr_Occurred()) return -1;
  if (overflow || v < INT32_MIN || v > INT32_MAX) {
    PyObject *text = PyObject_Str(o);
    const char *s = text ? PyUnicode_AsUTF8(text) : NULL;
    if (s) pmpy_fail(PM_E_OVERFLOW, "Python int %s too large to convert to int32", s);
    Py_XDECREF(text);
    return -1;
  }
  out->type = pm_scalar_type(PM_I32);
  out->weak = true;
  out->number.i = v;
  return 1;
}

static int numpy_scalar(PyObject *o, pmpy_arg *out) {
  PyArray_Descr *descr = PyArray_DescrFromScalar(o);
  pm_dtype d;
  int rc = descr ? pmpy_dtype_from((PyObject *)descr, &d) : -1;
  Py_XDECREF(descr);
  if (rc) return -1;
  out->type = pm_scalar_type(d);
  out->weak = false;
  PyObject *number = pm_is_float(d) ? PyNumber_Float(o) : PyNumber_Long(o);
  if (!number) return -1;
  if (pm_is_float(d)) {
    out->number.f = PyFloat_AsDouble(number);
    if (d == PM_F32) out->number.f = (float)out->number.f;
  } else {
    int overflow;
    out->number.i = PyLong_AsLongLongAndOverflow(number, &overflow);
    int64_t lo = pm_dtypes[d].class == PM_CLASS_INT ? INT32_MIN : 0;
    int64_t hi = pm_dtypes[d].class == PM_CLASS_INT ? INT32_MAX : UINT32_MAX;
    if (overflow || out->number.i < lo || out->number.i > hi) {
      pmpy_fail(PM_E_OVERFLOW, "a NumPy integer is too large to convert to %s", pm_dtypes[d].text);
      rc = -1;
    }
  }
  Py_DECREF(number);
  return rc ? -1 : 1;
}

PyObject *pmpy_size_value(PyObject *o) {
  static PyObject *name;
  if (PMPY_IS_ARRAY(o) || PyLong_Check(o) || PySlice_Check(o) || PyFloat_Check(o)) return NULL;
  if (!name && !(name = PyUnicode_InternFromString("_plgpu_traced"))) return NULL;
  PyObject *method = PyObject_GetAttr((PyObject *)Py_TYPE(o), name);
  if (!method) return PyErr_Clear(), NULL;
  PyObject *value = PyObject_CallOneArg(method, o);
  Py_DECREF(method);
  return value;
}

int pmpy_arg_from(pmpy_trace *t, PyObject *o, pmpy_arg *out) {
  out->val = 0;
  if (PMPY_IS_ARRAY(o)) {
    pmpy_traced *x = (pmpy_traced *)o;
    if (pmpy_check_open(t, x)) return -1;
    out->val = x->val;
    out->type = x->type;
    out->weak = x->weak;
    return 1;
  }
  if (PyFloat_CheckExact(o)) {
    out->type = pm_scalar_type(PM_F32);
    out->weak = true;
    out->number.f = PyFloat_AS_DOUBLE(o);
    return 1;
  }
  if (PyBool_Check(o)) {
    out->type = pm_scalar_type(PM_BOOL);
    out->weak = false;
    out->number.i = o == Py_True;
    return 1;
  }
  if (PyLong_Check(o)) return python_int(o, out);
  if (PyArray_IsScalar(o, Generic)) return numpy_scalar(o, out);
  if (PyArray_Check(o) && PyArray_NDIM((PyArrayObject *)o) == 0) {
    PyObject *scalar = PyArray_ToScalar(PyArray_DATA((PyArrayObject *)o), (PyArrayObject *)o);
    int rc = scalar ? numpy_scalar(scalar, out) : -1;
    Py_XDECREF(scalar);
    return rc;
  }
  if (PyArray_Check(o)) {
    pmpy_fail(PM_E_VALUE,
              "the kernel's body captures non-scalar array constants (a NumPy array of rank %d): "
              "pass it to the kernel as an operand",
              PyArray_NDIM((PyArrayObject *)o));
    return -1;
  }
  if (PyFloat_Check(o)) {
    out->type = pm_scalar_type(PM_F32);
    out->weak = true;
    out->number.f = PyFloat_AS_DOUBLE(o);
    return 1;
  }
  PyObject *size = pmpy_size_value(o);
  if (size) {
    const int rc = pmpy_arg_from(t, size, out);
    Py_DECREF(size);
    return rc;
  }
  if (PyErr_Occurred()) return -1;
  return 0;
}

int pmpy_arg_need(pmpy_trace *t, const char *op, PyObject *o, pmpy_arg *out) {
  int rc = pmpy_arg_from(t, o, out);
  if (rc > 0) return 0;
  if (rc < 0) return -1;
  if (PMPY_IS_REF(o)) {
    pmpy_traced *r = (pmpy_traced *)o;
    pmpy_fail(PM_E_TYPE, "%s: got a Ref (%s) where an array is expected; load it first: ref[...]",
              op, pmpy_type_text(&r->type));
  } else if (PyObject_HasAttrString(o, "__dlpack__")) {
    pmpy_fail(PM_E_VALUE,
              "%s: the kernel's body captures non-scalar array constants (%s): pass it to the "
              "kernel as an operand",
              op, Py_TYPE(o)->tp_name);
  } else {
    pmpy_fail(PM_E_TYPE, "%s: expected a traced array or a number, got %s", op,
              Py_TYPE(o)->tp_name);
  }
  return -1;
}

int pmpy_arg_for(pmpy_trace *t, const char *op, PyObject *o, pm_dtype dtype, pmpy_arg *out) {
  int overflow;
  if (!PyLong_CheckExact(o)) return pmpy_arg_need(t, op, o, out);
  const long long v = PyLong_AsLongLongAndOverflow(o, &overflow);
  const bool narrow = !overflow && v >= INT32_MIN && v <= INT32_MAX;
  const bool fits = dtype == PM_U32 && !overflow && v >= 0 && v <= UINT32_MAX;
  if (narrow || (!fits && !pm_is_float(dtype))) return pmpy_arg_need(t, op, o, out);
  out->val = 0;
  out->type = pm_scalar_type(dtype);
  out->weak = false;
  if (fits) {
    out->number.i = v;
    return 0;
  }
  out->number.f = PyLong_AsDouble(o);
  return out->number.f == -1 && PyErr_Occurred() ? -1 : 0;
}

pm_val pmpy_number(pmpy_trace *t, const pm_type *type, pm_scalar number) {
  char bytes[8];
  pm_store_scalar(type->dtype, bytes, number);
  number = pm_load_scalar(type->dtype, bytes);
  pm_attr_arg value = {.id = PM_ATTR_VALUE, .i = number.i}; /* a double goes in by its bits */
  return pmpy_emit(t, PM_OP_CONST, NULL, 0, type, &value, 1);
}

static pm_val int_number(pmpy_trace *t, pm_dtype d, int64_t i) {
  pm_type type = pm_scalar_type(d);
  pm_scalar number;
  if (pm_is_float(d)) number.f = (double)i;
  else number.i = i;
  return pmpy_number(t, &type, number);
}

static pm_scalar number_as(pm_dtype from, pm_dtype to, pm_scalar n) {
  if (to == PM_BOOL) return (pm_scalar){.i = pm_is_float(from) ? n.f != 0 : n.i != 0};
  if (pm_is_float(from) == pm_is_float(to)) return n; /* stored and rounded by pmpy_number */
  return pm_is_float(to) ? (pm_scalar){.f = (double)n.i} : pm_convert_scalar(from, to, n);
}

pm_val pmpy_arg_as(pmpy_trace *t, pmpy_arg *x, pm_dtype dtype) {
  if (!x->val) {
    pm_scalar number = number_as(x->type.dtype, dtype, x->number);
    x->type.dtype = (uint8_t)dtype;
    x->val = pmpy_number(t, &x->type, number);
  } else if (x->type.dtype != dtype && dtype == PM_BOOL) {
    if (x->type.dtype == PM_E8M0 && !pmpy_arg_as(t, x, PM_F32)) return 0; /* it has no zero */
    if (pm_is_small_int(x->type.dtype) && !pmpy_arg_as(t, x, PM_I32)) return 0;
    pm_val zero = int_number(t, x->type.dtype, 0);
    x->val = zero ? pmpy_emit(t, PM_OP_NE, (pm_val[]){x->val, zero}, 2, NULL, NULL, 0) : 0;
  } else if (x->type.dtype != dtype) {
    pm_type to = x->type;
    to.dtype = (uint8_t)dtype;
    x->val = pmpy_emit(t, PM_OP_CONVERT, &x->val, 1, &to, NULL, 0);
  }
  x->type.dtype = (uint8_t)dtype;
  return x->val;
}

/* ---- broadcasting -------------------------------------------------------------------------- */

static int incompatible(const char *op, const pmpy_arg *args, uint32_t n) {
  char text[512];
  size_t at = 0;
  text[0] = 0;
  for (uint32_t k = 0; k < n && at < sizeof text; k++) {
    const char *type = pmpy_type_text(&args[k].type);
    at += (size_t)snprintf(text + at, sizeof text - at, k ? ", %s" : "%s", type);
  }
  pmpy_fail(PM_E_VALUE, "%s: Incompatible shapes for broadcasting: %s", op, text);
  return -1;
}

pm_val pmpy_reshape(pmpy_trace *t, pm_val x, const pm_type *to) {
  for (pm_val v = x;;) {
    const pm_type *type = pm_typeof(t->g, v);
    if (type->rank == to->rank && !memcmp(type->dim, to->dim, sizeof(int64_t) * to->rank)) return v;
    pm_opid def = pm_value_of(t->g, v)->def;
    if (pm_get(t->g, def)->code != PM_OP_RESHAPE) break;
    v = pm_in(t->g, def, 0);
  }
  return pmpy_emit(t, PM_OP_RESHAPE, &x, 1, to, NULL, 0);
}

static int broadcast_one(pmpy_trace *t, pmpy_arg *x, const pm_type *to) {
  /* unit dims that grow, and leading unit dims, are dropped; the others map to dims of the result
   */
  pm_type kept = x->type, full = *to;
  int64_t dims[PM_MAX_RANK];
  uint32_t n = 0, offset = (uint32_t)(to->rank - x->type.rank);
  for (uint32_t k = 0; k < x->type.rank; k++) {
    if (x->type.dim[k] != to->dim[offset + k]) continue;
    kept.dim[n] = x->type.dim[k];
    dims[n++] = offset + k;
  }
  kept.rank = (uint8_t)n;
  for (uint32_t k = n; k < PM_MAX_RANK; k++) kept.dim[k] = 0;
  if (n != x->type.rank) {
    x->val = pmpy_reshape(t, x->val, &kept);
    x->type = kept;
    if (!x->val) return -1;
  }
  if (!n) return 0;
  full.dtype = x->type.dtype;
  pm_attr_arg attr = {.id = PM_ATTR_DIMS, .list = dims, .n = n};
  x->val = pmpy_emit(t, PM_OP_BROADCAST, &x->val, 1, &full, &attr, 1);
  x->type = full;
  return x->val ? 0 : -1;
}

int pmpy_broadcast(pmpy_trace *t, const char *op, pmpy_arg *args, uint32_t n) {
  pm_type to = pm_scalar_type(PM_BOOL);
  for (uint32_t k = 0; k < n; k++)
    to.rank = args[k].type.rank > to.rank ? args[k].type.rank : to.rank;
  for (uint32_t d = 0; d < to.rank; d++) to.dim[d] = 1;
  for (uint32_t k = 0; k < n; k++) {
    const pm_type *x = &args[k].type;
    for (uint32_t d = 0; d < x->rank; d++) {
      int64_t *dim = &to.dim[to.rank - x->rank + d];
      if (*dim == 1) *dim = x->dim[d];
      if (x->dim[d] != *dim && x->dim[d] != 1) return incompatible(op, args, n);
    }
  }
  for (uint32_t k = 0; k < n; k++) {
    const pm_type *x = &args[k].type;
    if (!x->rank || (x->rank == to.rank && !memcmp(x->dim, to.dim, sizeof(int64_t) * to.rank)))
      continue;
    if (broadcast_one(t, &args[k], &to)) return -1;
  }
  return 0;
}

/* ---- operators ----------------------------------------------------------------------------- */

static pm_val two(pmpy_trace *t, pm_opcode code, pm_val a, pm_val b) {
  return a && b ? pmpy_emit(t, code, (pm_val[]){a, b}, 2, NULL, NULL, 0) : 0;
}

static pm_val three(pmpy_trace *t, pm_opcode code, pm_val a, pm_val b, pm_val c) {
  return a && b && c ? pmpy_emit(t, code, (pm_val[]){a, b, c}, 3, NULL, NULL, 0) : 0;
}

static pm_val one(pmpy_trace *t, pm_opcode code, pm_val a) {
  return a ? pmpy_emit(t, code, &a, 1, NULL, NULL, 0) : 0;
}

/* A divisor: its known value, and whether dividend and divisor are provably >= 0 and > 0. */
typedef struct divisor {
  pm_val a, b;
  pm_dtype dtype;
  bool known, plain, positive;
  int64_t value;
} divisor;

static divisor divisor_of(const pmpy_trace *t, pm_val a, pm_val b, pm_dtype dtype) {
  divisor d = {.a = a, .b = b, .dtype = dtype};
  pm_scalar number;
  int64_t lo, hi;
  if (!pm_is_int(dtype)) {
    d.positive = pm_constant(t->g, b, &number) && number.f > 0;
    return d;
  }
  bool is_unsigned = pm_dtypes[dtype].class == PM_CLASS_UINT;
  /* what is folded has the shape of the dividend */
  d.known = pm_typeof(t->g, a)->rank >= pm_typeof(t->g, b)->rank && pm_constant(t->g, b, &number);
  if (d.known) d.value = number.i;
  d.positive =
      d.known ? d.value > 0 : !pm_typeof(t->g, b)->rank && pm_range(t->g, b, &lo, &hi) && lo > 0;
  bool dividend =
      is_unsigned || (!pm_typeof(t->g, a)->rank && pm_range(t->g, a, &lo, &hi) && lo >= 0);
  d.plain = dividend && (is_unsigned || d.positive);
  return d;
}

/* Does the truncated remainder r have the wrong sign for flooring? */
static pm_val wrong_sign(pmpy_trace *t, const divisor *d, pm_val r) {
  pm_val zero = int_number(t, d->dtype, 0);
  pm_val negative = two(t, PM_OP_LT, r, zero);
  if (d->positive) return negative;
  pm_val differ = two(t, PM_OP_NE, negative, two(t, PM_OP_LT, d->b, zero));
  return two(t, PM_OP_AND, two(t, PM_OP_NE, r, zero), differ);
}

static pm_val modulo(pmpy_trace *t, divisor d) {
  if (pm_is_int(d.dtype)) {
    if (d.known && pm_is_pow2(d.value) && !d.plain) {
      return two(t, PM_OP_AND, d.a, int_number(t, d.dtype, d.value - 1));
    }
    if (!d.positive && !(d.known && d.value)) { /* x % 0 is 0 */
      pm_val zero = two(t, PM_OP_EQ, d.b, int_number(t, d.dtype, 0));
      d.b = three(t, PM_OP_SELECT, zero, int_number(t, d.dtype, 1), d.b);
    }
  }
  pm_val r = two(t, PM_OP_REM, d.a, d.b);
  if (d.plain || !r) return r;
  pm_val wrong = wrong_sign(t, &d, r);
  return three(t, PM_OP_SELECT, wrong, two(t, PM_OP_ADD, r, d.b), r);
}

static pm_val floor_divide(pmpy_trace *t, divisor d) {
  if (pm_is_float(d.dtype)) {
    pm_val whole = two(t, PM_OP_SUB, d.a, modulo(t, d));
    return one(t, PM_OP_RINT, two(t, PM_OP_DIV, whole, d.b));
  }
  if (d.known && d.value == 1) return d.a;
  if (d.plain) return two(t, PM_OP_DIV, d.a, d.b);
  if (d.known && pm_is_pow2(d.value)) {
    return two(t, PM_OP_SHR, d.a, int_number(t, d.dtype, __builtin_ctzll((uint64_t)d.value)));
  }
  pm_val q = two(t, PM_OP_DIV, d.a, d.b);
  pm_val wrong = q ? wrong_sign(t, &d, two(t, PM_OP_REM, d.a, d.b)) : 0;
  return three(t, PM_OP_SELECT, wrong, two(t, PM_OP_SUB, q, int_number(t, d.dtype, 1)), q);
}

/* What is exact on powers of two, or is rounded up to one from a sum of two. */
static bool suits_e8m0(pm_opcode code) {
  switch (code) {
    case PM_OP_ADD:
    case PM_OP_MUL:
    case PM_OP_DIV:
    case PM_OP_RCP_APPROX:
    case PM_OP_MIN:
    case PM_OP_MAX:
    case PM_OP_LT:
    case PM_OP_LE:
    case PM_OP_GT:
    case PM_OP_GE: return true;
    default: return false;
  }
}

/* Arithmetic on arrays of 8 bits or less is not offered: widen first. Scalars are free. */
static int check_width(const char *name, pm_opcode code, pm_dtype d, const pmpy_arg *args,
                       uint32_t n) {
  if (pm_dtypes[d].bits > 8 || d == PM_BOOL) return 0;
  if (code == PM_OP_AND || code == PM_OP_OR || code == PM_OP_XOR || code == PM_OP_NOT ||
      code == PM_OP_EQ || code == PM_OP_NE || code == PM_OP_CLZ || code == PM_OP_POPCOUNT ||
      (code == PM_OP_ABS && pm_is_float(d)) || (d == PM_E8M0 && suits_e8m0(code))) {
    return 0;
  }
  for (uint32_t k = 0; k < n; k++) {
    if (!args[k].type.rank) continue;
    pmpy_fail(PM_E_NOT_IMPLEMENTED,
              "%s: Pointwise operations on %d-bit types are unsupported (except bitwise "
              "operations), got %s; "
              "convert it to a wider dtype first: x.astype(jnp.%s)",
              name, pm_dtypes[d].bits, pmpy_type_text(&args[k].type),
              pm_is_float(d) ? "float32" : "int32");
    return -1;
  }
  return 0;
}

static pm_val as_dtype(pmpy_trace *t, pm_val v, pm_dtype d) {
  pm_type to = *pm_typeof(t->g, v);
  to.dtype = (uint8_t)d;
  return pmpy_emit(t, PM_OP_CONVERT, &v, 1, &to, NULL, 0);
}

/* Of 4 bits or less: in int32, wrapped at the end; bits are counted among the low ones. */
static pm_val small_unary(pmpy_trace *t, pm_opcode code, pm_val x, pm_dtype d) {
  const bool counts = code == PM_OP_CLZ || code == PM_OP_POPCOUNT;
  x = as_dtype(t, x, PM_I32);
  const int bits = pm_dtypes[d].bits;
  if (counts) x = two(t, PM_OP_AND, x, int_number(t, PM_I32, (1 << bits) - 1));
  x = one(t, code, x);
  if (code == PM_OP_CLZ) x = two(t, PM_OP_SUB, x, int_number(t, PM_I32, 32 - bits));
  return x ? as_dtype(t, x, d) : 0;
}

static PyObject *result(pmpy_trace *t, pm_val v, bool weak) {
  return v ? pmpy_traced_new(t, v, weak) : NULL;
}

/* x to the low six bits of a traced whole number: squares, multiplied where y has a bit */
static pm_val integer_power(pmpy_trace *t, pmpy_arg *args, pm_dtype d) {
  pm_val one_ = 0, zero = 0, product = 0, square = pmpy_arg_as(t, &args[0], d);
  if (!square || !pmpy_arg_as(t, &args[1], d) || pmpy_broadcast(t, "power", args, 2)) return 0;
  square = args[0].val, one_ = int_number(t, d, 1), zero = int_number(t, d, 0);
  for (int k = 0; k < 6; k++) {
    pm_val bit = two(t, PM_OP_AND, args[1].val, int_number(t, d, 1 << k));
    pm_val factor = three(t, PM_OP_SELECT, two(t, PM_OP_NE, bit, zero), square, one_);
    product = k ? two(t, PM_OP_MUL, product, factor) : factor;
    if (k < 5) square = two(t, PM_OP_MUL, square, square);
    if (!product || !square) return 0;
  }
  return product;
}

/* A whole exponent that is known becomes multiplications, 0.5 and -0.5 roots. */
static PyObject *power(pmpy_trace *t, pmpy_arg *args) {
  pmpy_arg *x = &args[0], *y = &args[1];
  pm_dtype d;
  bool weak;
  if (pmpy_promote(args, 2, &d, &weak)) return NULL;
  if (d == PM_BOOL || (x->val && x->type.dtype == PM_BOOL && d == PM_I32)) {
    d = PM_I32;
    weak = false;
  }
  if (check_width("power", PM_OP_MUL, d, args, 2)) return NULL;
  if (pm_is_small_int(d)) {
    return pmpy_fail(PM_E_NOT_IMPLEMENTED, "power of %s; convert it first: x.astype(jnp.int32)",
                     pm_dtypes[d].text);
  }
  bool integral = !y->val && (!pm_is_float(y->type.dtype) || y->number.f == rint(y->number.f));
  double exponent = y->val ? 0 : pm_is_float(y->type.dtype) ? y->number.f : (double)y->number.i;
  if (!y->val && pm_is_float(d) && fabs(exponent) == 0.5) {
    return result(t, one(t, exponent > 0 ? PM_OP_SQRT : PM_OP_RSQRT, pmpy_arg_as(t, x, d)), weak);
  }
  double base = x->val ? 0 : pm_is_float(x->type.dtype) ? x->number.f : (double)x->number.i;
  if (base == 2 && pm_is_float(d)) return result(t, one(t, PM_OP_EXP2, pmpy_arg_as(t, y, d)), weak);
  if (pm_is_float(d) && (!integral || fabs(exponent) > 1024)) {
    if (!pmpy_arg_as(t, x, d) || !pmpy_arg_as(t, y, d) || pmpy_broadcast(t, "power", args, 2)) {
      return NULL;
    }
    return result(t, two(t, PM_OP_POW, x->val, y->val), weak);
  }
  if (y->val) return result(t, integer_power(t, args, d), weak);
  int64_t n = (int64_t)exponent, left = n < 0 ? -n : n;
  if (n < 0 && !pm_is_float(d)) {
    return pmpy_fail(PM_E_TYPE,
                     "power: Integers cannot be raised to negative powers, got %s ** %lld",
                     pm_dtypes[d].text, (long long)n);
  }
  if (!pmpy_arg_as(t, x, d)) return NULL;
  pm_type type = x->type;
  pm_val product = 0, square = x->val;
  for (; left; left >>= 1) {
    if (left & 1) product = product ? two(t, PM_OP_MUL, product, square) : square;
    if (left > 1) square = two(t, PM_OP_MUL, square, square);
    if (!square) return NULL;
  }
  if (n <= 0) {
    if (n) type = pm_scalar_type(d);
    pm_val unit = pmpy_number(t, &type, pm_is_float(d) ? (pm_scalar){.f = 1} : (pm_scalar){.i = 1});
    product = n ? two(t, PM_OP_DIV, unit, product) : unit;
  }
  return result(t, product, weak);
}

PyObject *pmpy_binary(pmpy_binop how, pm_opcode code, const char *name, PyObject *x, PyObject *y,
                      bool foreign_ok) {
  pmpy_trace *t = pmpy_begin(name, PMPY_IS_ARRAY(x) ? x : y);
  pmpy_arg args[2];
  if (!t) return NULL;
  for (int k = 0; k < 2; k++) {
    PyObject *o = k ? y : x;
    int rc = pmpy_arg_from(t, o, &args[k]);
    if (rc < 0) return NULL;
    if (rc) continue;
    if (foreign_ok && !PMPY_IS_REF(o)) Py_RETURN_NOTIMPLEMENTED;
    pmpy_arg_need(t, name, o, &args[k]);
    return NULL;
  }
  if (how == PMPY_POW) return power(t, args);
  pm_dtype d;
  bool weak;
  if (pmpy_promote(args, 2, &d, &weak)) return NULL;
  if ((how == PMPY_TRUE_DIVIDE || how == PMPY_FLOAT) && !pm_is_float(d)) {
    weak = weak && how == PMPY_TRUE_DIVIDE;
    d = PM_F32;
  }
  bool counts =
      how == PMPY_FLOOR_DIVIDE || how == PMPY_MOD || code == PM_OP_SHL || code == PM_OP_SHR;
  if (counts && d == PM_BOOL) d = PM_I32;
  if (code == PM_OP_SUB && d == PM_BOOL) {
    return pmpy_fail(PM_E_TYPE, "%s: bool has no subtraction; use ^ or convert to an integer",
                     name);
  }
  if (check_width(name, code, d, args, 2)) return NULL;
  if (!pmpy_arg_as(t, &args[0], d) || !pmpy_arg_as(t, &args[1], d)) return NULL;
  if (pmpy_broadcast(t, name, args, 2)) return NULL;
  const pm_dtype whole = d;
  if (pm_is_small_int(d)) { /* computed in int32, wrapped at the end */
    d = PM_I32;
    if (!pmpy_arg_as(t, &args[0], d) || !pmpy_arg_as(t, &args[1], d)) return NULL;
  }
  pm_val v;
  if (how == PMPY_FLOOR_DIVIDE) {
    v = floor_divide(t, divisor_of(t, args[0].val, args[1].val, d));
  } else if (how == PMPY_MOD) {
    v = modulo(t, divisor_of(t, args[0].val, args[1].val, d));
  } else if (how == PMPY_EXACT) {
    const pm_attr_arg exact = {.id = PM_ATTR_EXACT, .i = 1};
    v = pmpy_emit(t, code, (pm_val[]){args[0].val, args[1].val}, 2, NULL, &exact, 1);
  } else {
    v = two(t, code, args[0].val, args[1].val);
  }
  if (v && whole != d && how != PMPY_COMPARE) v = as_dtype(t, v, whole);
  return result(t, v, weak && how != PMPY_COMPARE);
}

static bool floats_only(pm_opcode code) { return code >= PM_OP_EXP && code <= PM_OP_COS; }
static bool rounds(pm_opcode code) { return code >= PM_OP_FLOOR && code <= PM_OP_RINT; }

PyObject *pmpy_unary(pm_opcode code, PyObject *o) {
  const char *name = pm_op_name(code);
  pmpy_trace *t = pmpy_begin(name, o);
  pmpy_arg x;
  if (!t || pmpy_arg_need(t, name, o, &x)) return NULL;
  pm_dtype d = x.type.dtype;
  bool weak = x.weak;
  if (floats_only(code) && !pm_is_float(d)) {
    d = PM_F32;
    weak = false;
  }
  if (code == PM_OP_NEG && d == PM_BOOL) {
    return pmpy_fail(PM_E_TYPE, "neg: bool has no negative; use ~ for the logical complement");
  }
  if (check_width(name, code, d, &x, 1) || !pmpy_arg_as(t, &x, d)) return NULL;
  bool identity = (rounds(code) && !pm_is_float(d)) ||
                  (code == PM_OP_ABS && (d == PM_BOOL || pm_dtypes[d].class == PM_CLASS_UINT));
  if (pm_is_small_int(d) && !identity) return result(t, small_unary(t, code, x.val, d), weak);
  return result(t, identity ? x.val : one(t, code, x.val), weak);
}

PyObject *pmpy_convert(pmpy_trace *t, pmpy_arg *x, pm_dtype dtype, bool weak) {
  return result(t, pmpy_arg_as(t, x, dtype), weak && (dtype == PM_I32 || dtype == PM_F32));
}

PyObject *pmpy_select(pmpy_trace *t, pmpy_arg *cond, pmpy_arg *x, pmpy_arg *y) {
  pmpy_arg args[3] = {*x, *y, *cond};
  pm_dtype d;
  bool weak;
  if (pmpy_promote(args, 2, &d, &weak)) return NULL;
  if (!pmpy_arg_as(t, &args[0], d) || !pmpy_arg_as(t, &args[1], d) ||
      !pmpy_arg_as(t, &args[2], PM_BOOL) || pmpy_broadcast(t, "where", args, 3)) {
    return NULL;
  }
  return result(t, three(t, PM_OP_SELECT, args[2].val, args[0].val, args[1].val), weak);
}

/* ---- functions ----------------------------------------------------------------------------- */

static const struct {
  const char *name;
  uint8_t how, code;
} binary_ops[] = {
    {"add", PMPY_SIMPLE, PM_OP_ADD},
    {"sub", PMPY_SIMPLE, PM_OP_SUB},
    {"mul", PMPY_SIMPLE, PM_OP_MUL},
    {"true_divide", PMPY_TRUE_DIVIDE, PM_OP_DIV},
    {"floor_divide", PMPY_FLOOR_DIVIDE, PM_OP_DIV},
    {"mod", PMPY_MOD, PM_OP_REM},
    {"remainder", PMPY_MOD, PM_OP_REM},
    {"pow", PMPY_POW, PM_OP_MUL},
    {"power", PMPY_POW, PM_OP_MUL},
    {"div", PMPY_SIMPLE, PM_OP_DIV},
    {"div_exact", PMPY_EXACT, PM_OP_DIV},
    {"rem", PMPY_SIMPLE, PM_OP_REM},
    {"atan2", PMPY_FLOAT, PM_OP_ATAN2},
    {"min", PMPY_SIMPLE, PM_OP_MIN},
    {"max", PMPY_SIMPLE, PM_OP_MAX},
    {"minimum", PMPY_SIMPLE, PM_OP_MIN},
    {"maximum", PMPY_SIMPLE, PM_OP_MAX},
    {"and", PMPY_SIMPLE, PM_OP_AND},
    {"or", PMPY_SIMPLE, PM_OP_OR},
    {"xor", PMPY_SIMPLE, PM_OP_XOR},
    {"shl", PMPY_SIMPLE, PM_OP_SHL},
    {"shr", PMPY_SIMPLE, PM_OP_SHR},
    {"eq", PMPY_COMPARE, PM_OP_EQ},
    {"ne", PMPY_COMPARE, PM_OP_NE},
    {"lt", PMPY_COMPARE, PM_OP_LT},
    {"le", PMPY_COMPARE, PM_OP_LE},
    {"gt", PMPY_COMPARE, PM_OP_GT},
    {"ge", PMPY_COMPARE, PM_OP_GE},
};

static const char *name_arg(PyObject *const *args, Py_ssize_t n, Py_ssize_t expected,
                            const char *what) {
  const char *name = n == expected && PyUnicode_Check(args[0]) ? PyUnicode_AsUTF8(args[0]) : NULL;
  if (!name && !PyErr_Occurred()) {
    PyErr_Format(PyExc_TypeError, "%s: expected a name and %zd operands", what, expected - 1);
  }
  return name;
}

static PyObject *binary(PyObject *module, PyObject *const *args, Py_ssize_t n) {
  (void)module;
  const char *name = name_arg(args, n, 3, "binary");
  if (!name) return NULL;
  for (size_t k = 0; k < PM_COUNT(binary_ops); k++) {
    if (strcmp(binary_ops[k].name, name)) continue;
    return pmpy_binary(binary_ops[k].how, binary_ops[k].code, name, args[1], args[2], false);
  }
  return pmpy_fail(PM_E_VALUE, "binary: there is no operation '%s'", name);
}

static PyObject *unary(PyObject *module, PyObject *const *args, Py_ssize_t n) {
  (void)module;
  const char *name = name_arg(args, n, 2, "unary");
  if (!name) return NULL;
  int code = pm_op_find(name, strlen(name));
  if (code < PM_OP_NEG || code > PM_OP_RINT) {
    return pmpy_fail(PM_E_VALUE, "unary: there is no operation '%s'", name);
  }
  return pmpy_unary((pm_opcode)code, args[1]);
}

static PyObject *where(PyObject *module, PyObject *const *args, Py_ssize_t n) {
  (void)module;
  pmpy_trace *t = pmpy_begin("where", n ? args[0] : NULL);
  pmpy_arg a[3];
  if (!t) return NULL;
  if (n != 3) return pmpy_fail(PM_E_TYPE, "where: expected cond, x and y, got %zd arguments", n);
  for (int k = 0; k < 3; k++) {
    if (pmpy_arg_need(t, "where", args[k], &a[k])) return NULL;
  }
  return pmpy_select(t, &a[0], &a[1], &a[2]);
}

static PyObject *convert(PyObject *module, PyObject *args, PyObject *kw) {
  static char *names[] = {"x", "dtype", "weak", NULL};
  (void)module;
  PyObject *o, *dtype;
  int weak = 0;
  pm_dtype d;
  pmpy_arg x;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "OO|p:convert", names, &o, &dtype, &weak) ||
      pmpy_dtype_from(dtype, &d)) {
    return NULL;
  }
  pmpy_trace *t = pmpy_begin("convert", o);
  return t && !pmpy_arg_for(t, "convert", o, d, &x) ? pmpy_convert(t, &x, d, weak) : NULL;
}

static PyObject *as_array(PyObject *module, PyObject *args, PyObject *kw) {
  static char *names[] = {"x", "dtype", NULL};
  (void)module;
  PyObject *o, *dtype = Py_None;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "O|O:as_array", names, &o, &dtype)) return NULL;
  pmpy_trace *t = pmpy_begin("as_array", o);
  pmpy_arg x;
  pm_dtype d = PM_BOOL;
  if (!t || (dtype != Py_None && pmpy_dtype_from(dtype, &d))) return NULL;
  if (dtype == Py_None ? pmpy_arg_need(t, "as_array", o, &x)
                       : pmpy_arg_for(t, "as_array", o, d, &x)) {
    return NULL;
  }
  if (dtype == Py_None) d = x.type.dtype;
  if (PMPY_IS_ARRAY(o) && dtype == Py_None) return Py_NewRef(o);
  return pmpy_convert(t, &x, d, dtype == Py_None && x.weak);
}

/* Node of a dtype or value. Works outside of a trace too. */
static int node_from(PyObject *o, uint8_t *node) {
  pm_dtype d;
  bool weak = false;
  if (PMPY_IS_ARRAY(o) || PMPY_IS_REF(o)) {
    d = ((pmpy_traced *)o)->type.dtype;
    weak = ((pmpy_traced *)o)->weak;
  } else if (PyBool_Check(o)) {
    d = PM_BOOL;
  } else if (PyLong_Check(o)) {
    d = PM_I32;
    weak = true;
  } else if (PyFloat_CheckExact(o)) {
    d = PM_F32;
    weak = true;
  } else if (PyArray_IsScalar(o, Generic) || PyArray_Check(o)) {
    PyObject *descr = PyObject_GetAttrString(o, "dtype");
    int rc = descr ? pmpy_dtype_from(descr, &d) : -1;
    Py_XDECREF(descr);
    if (rc) return -1;
  } else if (pmpy_dtype_from(o, &d)) {
    return -1;
  }
  *node = node_of(d, weak);
  return 0;
}

static int join_all(PyObject *const *items, Py_ssize_t n, uint8_t *node) {
  if (!n) {
    pmpy_fail(PM_E_TYPE, "promote_types: expected at least one dtype or value");
    return -1;
  }
  for (Py_ssize_t k = 0; k < n; k++) {
    uint8_t next;
    if (node_from(items[k], &next)) return -1;
    const uint8_t both = k ? join_nodes(*node, next) : next;
    if (both == NO_WAY) return no_way(*node, next);
    *node = both;
  }
  return 0;
}

static PyObject *promote_types(PyObject *module, PyObject *list) {
  (void)module;
  uint8_t node;
  PyObject *seq = PySequence_Fast(list, "promote_types: expected a list of dtypes or values");
  if (!seq) return NULL;
  int rc = join_all(PySequence_Fast_ITEMS(seq), PySequence_Fast_GET_SIZE(seq), &node);
  Py_DECREF(seq);
  return rc ? NULL
            : Py_BuildValue("(NO)", pmpy_dtype_object(dtype_of(node)),
                            node >= WI ? Py_True : Py_False);
}

static PyObject *result_dtype(PyObject *module, PyObject *const *args, Py_ssize_t n) {
  (void)module;
  uint8_t node;
  return join_all(args, n, &node) ? NULL : pmpy_dtype_object(dtype_of(node));
}

static PyObject *is_tracer(PyObject *module, PyObject *x) {
  (void)module;
  return PyBool_FromLong(PMPY_IS_ARRAY(x));
}

static PyMethodDef functions[] = {
    {"unary", (PyCFunction)(void (*)(void))unary, METH_FASTCALL, "unary(name, x) -> Array"},
    {"binary", (PyCFunction)(void (*)(void))binary, METH_FASTCALL,
     "binary(name, x, y) -> Array, with jnp's promotion and broadcasting"},
    {"where", (PyCFunction)(void (*)(void))where, METH_FASTCALL, "where(cond, x, y) -> Array"},
    {"convert", (PyCFunction)(void (*)(void))convert, METH_VARARGS | METH_KEYWORDS,
     "convert(x, dtype, weak=False) -> Array"},
    {"as_array", (PyCFunction)(void (*)(void))as_array, METH_VARARGS | METH_KEYWORDS,
     "as_array(x, dtype=None) -> Array"},
    {"promote_types", promote_types, METH_O, "promote_types(dtypes_or_values) -> (dtype, weak)"},
    {"result_dtype", (PyCFunction)(void (*)(void))result_dtype, METH_FASTCALL,
     "result_dtype(*dtypes_or_values) -> dtype"},
    {"is_tracer", is_tracer, METH_O, "Is x a traced array?"},
    {NULL, NULL, 0, NULL}};

int pmpy_init_promote(PyObject *module) {
  import_array1(-1);
  return PyModule_AddFunctions(module, functions);
}
