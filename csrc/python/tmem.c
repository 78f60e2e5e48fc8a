/* Tensor memory in kernels that are traced: allocations and loads. */
#include "../ir/tmem.h"
#include "trace.h"

/* check_tmem(shape, dtype, layout, packing) */
static PyObject *check_tmem(PyObject *module, PyObject *args) {
  (void)module;
  PyObject *shape, *dtype;
  const char *layout;
  int packing;
  pm_dtype d;
  pm_type type = {.kind = PM_REF, .space = PM_TMEM};
  int64_t number;
  if (!PyArg_ParseTuple(args, "OOsi:check_tmem", &shape, &dtype, &layout, &packing) ||
      pmpy_dtype_from(dtype, &d) || pmpy_shape(shape, "plgpu.TMEM", &type) ||
      pmpy_enum_value(PM_ATTR_TMEM_LAYOUT, layout, &number)) {
    return NULL;
  }
  type.dtype = (uint8_t)d;
  pm_arena arena;
  pm_arena_init(&arena);
  const char *why = pm_tmem_refusal(&arena, &type, number, packing);
  if (why) {
    pmpy_fail(PM_E_VALUE, "plgpu.TMEM: %s: %s", pm_type_text(&arena, &type), why);
  }
  pm_arena_free(&arena);
  if (why) return NULL;
  Py_RETURN_NONE;
}

static PyObject *alloc_tmem(PyObject *module, PyObject *args, PyObject *kw) {
  static char *names[] = {"shape", "dtype", "layout", "packing", "pair", "name", "union", NULL};
  (void)module;
  PyObject *shape, *dtype, *overlay = Py_None;
  const char *layout, *name = NULL;
  int packing, pair;
  pm_dtype d;
  pm_type type = {.kind = PM_REF, .space = PM_TMEM};
  int64_t number, place[2];
  int n = 0;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "OOsii|zO:alloc_tmem", names, &shape, &dtype, &layout,
                                   &packing, &pair, &name, &overlay) ||
      pmpy_dtype_from(dtype, &d)) {
    return NULL;
  }
  pmpy_trace *t = pmpy_begin_alloc("TMEM");
  if (!t || pmpy_shape(shape, "TMEM", &type) ||
      pmpy_enum_value(PM_ATTR_TMEM_LAYOUT, layout, &number)) {
    return NULL;
  }
  if (overlay != Py_None) n = pmpy_ints(overlay, "union", place, 2);
  if (n < 0) return NULL;
  type.dtype = (uint8_t)d;
  pm_attr_arg attrs[] = {{.id = PM_ATTR_TMEM_LAYOUT, .i = number},
                         {.id = PM_ATTR_PACKING, .i = packing},
                         {.id = PM_ATTR_PAIR, .i = pair},
                         {.id = PM_ATTR_UNION, .list = place, .n = (uint32_t)n}};
  return pmpy_allocated(t, pmpy_emit(t, PM_OP_ALLOC_TMEM, NULL, 0, &type, attrs, 4), name);
}

/* load_tmem(ref, layout or None, reduce) */
static PyObject *load_tmem(PyObject *module, PyObject *const *args, Py_ssize_t n) {
  (void)module;
  const char *reduce = n == 3 && PyUnicode_Check(args[2]) ? PyUnicode_AsUTF8(args[2]) : NULL;
  pmpy_trace *t = pmpy_begin("async_load_tmem", NULL);
  pm_attr_arg attrs[2] = {{.id = PM_ATTR_LAYOUT}, {.id = PM_ATTR_TMEM_REDUCE}};
  if (!t) return NULL;
  if (!reduce || !PMPY_IS_REF(args[0])) {
    return pmpy_fail(PM_E_TYPE, "load_tmem: expected a ref, a layout and a reduction");
  }
  const pmpy_traced *r = (const pmpy_traced *)args[0];
  if (pmpy_check_open(t, r) || pmpy_enum_value(PM_ATTR_TMEM_REDUCE, reduce, &attrs[1].i)) {
    return NULL;
  }
  if (args[1] != Py_None && !(attrs[0].i = pmpy_layout(t, args[1], &r->type))) return NULL;
  const pm_val v = pmpy_emit(t, PM_OP_LOAD_TMEM, &r->val, 1, NULL, attrs, 2);
  return v ? pmpy_traced_new(t, v, false) : NULL;
}

#define KEYWORDS(fn) (PyCFunction)(void (*)(void)) fn, METH_VARARGS | METH_KEYWORDS
static PyMethodDef functions[] = {
    {"alloc_tmem", KEYWORDS(alloc_tmem),
     "alloc_tmem(shape, dtype, layout, packing, pair, name=None, union=None) -> Ref"},
    {"check_tmem", check_tmem, METH_VARARGS,
     "check_tmem(shape, dtype, layout, packing); ValueError"},
    {"load_tmem", (PyCFunction)(void (*)(void))load_tmem, METH_FASTCALL,
     "load_tmem(ref, layout, reduce) -> Array"},
    {NULL, NULL, 0, NULL}};

int pmpy_init_tmem(PyObject *module) { return PyModule_AddFunctions(module, functions); }
