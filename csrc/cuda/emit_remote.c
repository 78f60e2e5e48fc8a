/* Memory of other devices, and of all devices at once.
 *
 * A kernel for a mesh of devices has one more parameter, the table of peers: which device this is,
 * and for each argument that it accesses elsewhere the address there, by device. A remote view is
 * the same offset from another base, so that loads, stores, atomics and copies of contiguous bytes
 * need no other instructions. A copy by tensor maps takes the map of the device, of which there is
 * one for each. The counters of the launch, with its semaphores, are an argument like others.
 *
 * What goes to all devices has an address at which the switch multicasts stores and combines loads
 * (multimem). It is an alias of the memory of each of them: a proxy fence stands where a thread has
 * waited for others. */
#include "gen.h"

static uint32_t entry_of(pm_gen *e, int32_t param) {
  uint32_t k = 0;
  e->in_mesh = true;
  while (k < e->peers.n && e->peers.at[k] != param) k++;
  if (k == e->peers.n) pm_vec_push(e->arena, &e->peers, param);
  return k;
}

const char *pm_remote_base(pm_gen *e, const pm_view *v, int32_t param, const char *type,
                           int64_t first) {
  const uint32_t k = entry_of(e, param);
  const char *base = pm_str(e, "address_on_all<%s>(peers, %u)", type, k);
  if (!v->all_devices)
    base = pm_str(e, "peer<%s>(peers, %u, %s)", type, k, pm_scalar_of(e, v->device_val));
  return first ? pm_str(e, "%s + %lld", base, (long long)first) : base;
}

const char *pm_device_index(pm_gen *e, uint32_t axis) {
  const pm_graph *g = e->g;
  int64_t below = 1;
  e->in_mesh = true;
  for (uint32_t k = axis + 1; k < g->n_mesh; k++) below *= g->mesh[k];
  const char *at = "(i32)peers.rank";
  if (below > 1) at = pm_str(e, "%s / %lld", at, (long long)below);
  return axis ? pm_str(e, "%s %% %lld", at, (long long)g->mesh[axis]) : at;
}

const char *pm_remote_map(pm_gen *e, const pm_view *v, const pm_tensor_map *m, const char *name) {
  if (m->of != PM_MAP_OWN) entry_of(e, m->param);
  if (m->of != PM_MAP_PEERS) return pm_str(e, "&%s", name);
  return pm_str(e, "&%s.of[%s]", name, pm_scalar_of(e, v->device_val));
}

void pm_print_peers(pm_gen *e, pm_text *out, const char *sep) {
  pm_program *p = e->program;
  const char *comma = "";
  p->n_peers = e->peers.n;
  p->peers = e->peers.at;
  pm_putf(out, "%sconst __grid_constant__ Peers<%u, %u> peers /* ", sep,
          (unsigned)pm_max(p->n_peers, 1), p->n_devices);
  for (uint32_t k = 0; k < p->n_peers; k++, comma = ", ") {
    const int32_t param = p->peers[k];
    pm_putf(out, "%s%s", comma, param < 0 ? "counters" : p->names[param]);
  }
  pm_put(out, p->n_peers ? " */" : "rank */");
}

/* ---- through the switch ------------------------------------------------------------------ */

/* "v4.bf16x2": n elements as one access of 4, 8 or 16 bytes; *words: of how many registers. */
static const char *access_type(pm_gen *e, pm_dtype d, int64_t n, bool store, int64_t *words) {
  const int64_t bytes = n * pm_dtypes[d].bytes, each = 4 / pm_dtypes[d].bytes;
  const char *type = store ? "f32" : pm_dtypes[d].short_name;
  *words = bytes / 4;
  if (bytes < 4) return NULL;
  if (!store && each > 1) type = pm_str(e, "%sx%lld", type, (long long)each);
  return *words > 1 ? pm_str(e, "v%lld.%s", (long long)*words, type) : type;
}

static const char *braces(pm_gen *e, int64_t first, int64_t n) {
  pm_text t;
  pm_text_init(&t, e->arena);
  for (int64_t k = 0; k < n; k++) pm_putf(&t, "%s%%%lld", k ? ", " : "", (long long)(first + k));
  return n > 1 ? pm_str(e, "{%s}", t.at) : t.at;
}

/* The words, each as the argument of a function ("f32_bits("), if there is one. */
static const char *operands(pm_gen *e, const char *constraint, const char *word, int64_t n) {
  pm_text t;
  pm_text_init(&t, e->arena);
  for (int64_t k = 0; k < n; k++) {
    pm_putf(&t, "%s\"%s\"(%sw[%lld]%s)", k ? ", " : "", constraint, word, (long long)k,
            *word ? ")" : "");
  }
  return t.at;
}

/* Integers have no vectors. */
static const char *load_function(pm_gen *e, const char *name, pm_dtype d, int64_t n, int64_t words,
                                 const char *type) {
  const bool whole = d == PM_I32 || d == PM_U32,
             bits = e->multimem[0] == 'a' && e->multimem[1] == 'n';
  const bool logical = whole && (bits || e->multimem[0] == 'o' || e->multimem[0] == 'x');
  const char *reg = d == PM_F32 ? "f32" : "u32", *c = d == PM_F32 ? "=f" : "=r";
  const char *cpp = pm_cpp_type(d);
  if (whole) type = logical ? "b32" : pm_dtypes[d].short_name;
  const char *head =
      pm_str(e, "// combined over all devices\nFN void %s(%s* x, const %s* a) {\n", name, cpp, cpp);
  if (whole) {
    return pm_str(e,
                  "%s  u32 w;\n"
                  "  for (int k = 0; k < %lld; k++) {\n"
                  "    asm volatile(\"multimem.ld_reduce.relaxed.sys.global.%s.%s %%0, [%%1];\"\n"
                  "                 : \"=r\"(w) : \"l\"(a + k) : \"memory\");\n"
                  "    x[k] = (%s)w;\n  }\n}\n",
                  head, (long long)n, e->multimem, type, cpp);
  }
  return pm_str(e,
                "%s  %s w[%lld];\n"
                "  asm volatile(\"multimem.ld_reduce.relaxed.sys.global.%s.%s %s, [%%%lld];\"\n"
                "               : %s : \"l\"(a) : \"memory\");\n"
                "  %s\n}\n",
                head, reg, (long long)words, e->multimem, type, braces(e, 0, words),
                (long long)words, operands(e, c, "", words),
                d == PM_F32 ? pm_str(e, "for (int k = 0; k < %lld; k++) x[k] = w[k];", (long long)n)
                            : pm_str(e, "unpack<%s, %lld>(x, w);", cpp, (long long)n));
}

const char *pm_multimem(pm_gen *e, const pm_view *v, int64_t n, bool store) {
  const pm_dtype d = (pm_dtype)v->dtype;
  int64_t words;
  const char *type = access_type(e, d, n, store, &words), *cpp = pm_cpp_type(d);
  const char *name = store ? pm_str(e, "st_multimem_%s_%lld", cpp, (long long)n)
                           : pm_str(e, "ld_multimem_%s_%s_%lld", e->multimem, cpp, (long long)n);
  if (!type) {
    e->async.narrow = true;
    return name;
  }
  if (!store) return pm_ptx(e, name, load_function(e, name, d, n, words, type));
  return pm_ptx(e, name,
                pm_str(e,
                       "// to all devices\nFN void %s(%s* a, const %s* x) {\n"
                       "  u32 w[%lld];\n"
                       "  pack<%s, %lld>(w, x);\n"
                       "  asm volatile(\"multimem.st.relaxed.sys.global.%s [%%0], %s;\"\n"
                       "               :: \"l\"(a), %s : \"memory\");\n}\n",
                       name, cpp, cpp, (long long)words, cpp, (long long)n, type,
                       braces(e, 1, words), operands(e, "f", "f32_bits(", words)));
}

static pm_code view_of(pm_gen *e, pm_opid op, pm_view *v) {
  if (pm_view_of(e->g, pm_in(e->g, op, 0), true, v, e->err)) {
    pm_err_op(e->err, e->g, op);
    return e->err->code;
  }
  v->all_devices = true;
  e->async.narrow = false;
  return PM_OK;
}

static pm_code check_width(pm_gen *e, pm_opid op) {
  if (!e->async.narrow) return PM_OK;
  return pm_gen_fail(e, op, PM_E_NOT_IMPLEMENTED,
                     "%s: lanes would access less than 32 bits at once; give the array a layout "
                     "with neighbours in one lane (plgpu.layout_cast to "
                     "Layout.WG_STRIDED(shape, vec_size)), or use a wider dtype",
                     pm_ops[pm_get(e->g, op)->code].text);
}

pm_code pm_cuda_MULTIMEM_STORE(pm_gen *e, pm_opid op) {
  const pm_val in = pm_in(e->g, op, 1);
  pm_view v;
  PM_TRY(view_of(e, op, &v));
  pm_note(e, op, "multimem_store");
  if (e->slot[in].form == PM_FORM_WORDS || pm_is_array(e, in)) {
    pm_store_array(e, pm_value_layout(e->g, in), &v, e->slot[in].text,
                   e->slot[in].form == PM_FORM_WORDS);
  } else {
    pm_store_splat(e, &v, pm_at(e, in, "0"));
  }
  return check_width(e, op);
}

pm_code pm_cuda_MULTIMEM_REDUCE(pm_gen *e, pm_opid op) {
  const pm_val out = pm_get(e->g, op)->out;
  pm_view v;
  PM_TRY(view_of(e, op, &v));
  pm_note(e, op, "multimem_load_reduce");
  e->multimem = pm_enum_text(PM_ENUM_ATOMIC, *pm_attr(e->g, op, PM_ATTR_ATOMIC));
  const char *name = pm_declare(e, out, out);
  if (pm_is_array(e, out)) {
    pm_load_array(e, pm_value_layout(e->g, out), &v, name, false);
  } else {
    pm_line(e, "%s(&%s, %s);", pm_multimem(e, &v, 1, false), name, pm_view_address(e, &v));
  }
  e->multimem = NULL;
  return check_width(e, op);
}
