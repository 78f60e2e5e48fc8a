/* For tests: the numbers of cuda/tcgen05.c. */
#include "../cuda/tcgen05.h"
#include "module.h"

static int operand_of(PyObject *x, void *out) {
  pm_tcgen05_operand *o = out;
  int k_major, swizzle;
  long long chunk, group;
  if (!PyArg_ParseTuple(x, "piLL", &k_major, &swizzle, &chunk, &group)) return 0;
  *o = (pm_tcgen05_operand){k_major, (uint8_t)swizzle, chunk, group};
  return 1;
}

static int dtype_of(PyObject *x, void *out) { return x == Py_None || pmpy_dtype_from(x, out) == 0; }

static PyObject *steps_of(const pm_tcgen05_product *p) {
  PyObject *out = PyList_New(0);
  for (int piece = 0; out && piece < pm_tcgen05_pieces(p); piece++) {
    for (int64_t k = 0; out && k < pm_tcgen05_steps(p); k++) {
      const pm_tcgen05_step s = pm_tcgen05_at(p, piece, k);
      PyObject *row =
          Py_BuildValue("(IILLOIII)", s.d, s.instruction, (long long)s.a, (long long)s.b,
                        s.first ? Py_True : Py_False, s.a_scale, s.b_scale, s.metadata);
      if (!row || PyList_Append(out, row)) Py_CLEAR(out);
      Py_XDECREF(row);
    }
  }
  return out;
}

static PyObject *tcgen05_product(PyObject *Py_UNUSED(self), PyObject *args, PyObject *kw) {
  static char *names[] = {"kind",  "a",      "b",    "d",         "rows", "columns", "k", "scale",
                          "block", "sparse", "pair", "a_in_tmem", "in_a", "in_b",    NULL};
  pm_tcgen05_product p = {0};
  long long rows, columns, k;
  int sparse = 0, pair = 0, in_tmem = 0;
  if (!PyArg_ParseTupleAndKeywords(args, kw, "sO&O&O&LLL|O&ipppO&O&", names, &p.kind, dtype_of,
                                   &p.a, dtype_of, &p.b, dtype_of, &p.d, &rows, &columns, &k,
                                   dtype_of, &p.scale, &p.block, &sparse, &pair, &in_tmem,
                                   operand_of, &p.in_a, operand_of, &p.in_b)) {
    return NULL;
  }
  p.rows = rows, p.b_columns = columns, p.k = k;
  p.sparse = sparse, p.pair = pair, p.a_in_tmem = in_tmem;
  PyObject *steps = steps_of(&p);
  if (!steps) return NULL;
  pm_arena a;
  pm_arena_init(&a);
  PyObject *out = Py_BuildValue("(sKKN)", pm_tcgen05_name(&a, &p),
                                (unsigned long long)pm_tcgen05_matrix_of(&p.in_a),
                                (unsigned long long)pm_tcgen05_matrix_of(&p.in_b), steps);
  pm_arena_free(&a);
  return out;
}

static PyMethodDef functions[] = {
    {"tcgen05_product", (PyCFunction)(void (*)(void))tcgen05_product, METH_VARARGS | METH_KEYWORDS,
     "Name, descriptors and steps of a tcgen05 product: see csrc/cuda/tcgen05.h."},
    {NULL, NULL, 0, NULL},
};

int pmpy_init_encodings(PyObject *module) { return PyModule_AddFunctions(module, functions); }
