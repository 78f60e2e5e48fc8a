/* Outputs that share memory with other arrays of a call, or of the calls of a mesh.
 *
 * A kernel may work in place: an output that is exactly an operand (the same first byte, the same
 * number of bytes) is accepted, unless the caller says that this kernel cannot. Any other overlap
 * would be read or written again after another block has changed it, so it is refused before
 * anything runs. Extents are those of the caller's memory; operands that were copied on the way in
 * have none. */
#include "kernel.h"

typedef struct extent {
  uint64_t begin, end; /* addresses */
} extent;

static inline extent extent_of(const pmpy_buffer *b) {
  const pm_dtype_info *t = &pm_dtypes[b->dtype];
  uint64_t n = t->bytes;
  if (b->source->library == PMPY_NONE || b->copied) return (extent){0, 0};
  for (uint32_t d = 0; d < b->rank; d++) {
    if (!b->strided || !b->shape[d]) n *= (uint64_t)b->shape[d];
    else n += (uint64_t)(b->shape[d] - 1) * (uint64_t)b->stride[d] * t->bytes;
  }
  if (t->bits < 8 && b->cuda) n /= 2; /* NumPy has a byte for each element of 4 bits */
  return (extent){b->ptr, b->ptr + n};
}

/* Bytes that both have. */
static inline uint64_t common(extent a, extent b) {
  const uint64_t begin = a.begin > b.begin ? a.begin : b.begin;
  const uint64_t end = a.end < b.end ? a.end : b.end;
  return begin < end ? end - begin : 0;
}

static int refuse(const pmpy_call *c, int out, int other, uint64_t shared, const char *why) {
  char x[32], y[32];
  PyErr_Format(PyExc_ValueError, "kernel %U: %s and %s share %llu bytes of memory: %s", c->name,
               pmpy_which(out, x), pmpy_which(other, y), (unsigned long long)shared, why);
  return -1;
}

int pmpy_call_check_overlap(const pmpy_call *c) {
  for (uint32_t i = 0; i < c->n_out_given; i++) {
    const extent out = extent_of(&c->out[i]);
    for (uint32_t k = 0; k < c->n_in; k++) {
      if (c->in[k].ptr >= out.end) continue;
      const extent in = extent_of(&c->in[k]);
      const uint64_t shared = common(out, in);
      if (!shared) continue;
      if (out.begin != in.begin || out.end != in.end || c->in[k].strided)
        return refuse(c, -(int)i - 1, (int)k, shared,
                      "what the kernel writes to one would be read through the other. Pass an "
                      "array that overlaps no operand, or exactly the operand to work in place");
      if (!c->in_place || (c->k && c->k->apart))
        return refuse(c, -(int)i - 1, (int)k, shared,
                      "it reads its operands while it writes its result, so that it cannot work "
                      "in place. Pass an array that overlaps no operand");
    }
    for (uint32_t k = 0; k < i; k++) {
      const uint64_t shared = common(out, extent_of(&c->out[k]));
      if (shared)
        return refuse(c, -(int)k - 1, -(int)i - 1, shared, "each output needs memory of its own");
    }
  }
  return 0;
}

/* The same between two devices of a mesh, which may both be the host, or one GPU. */
int pmpy_calls_check_overlap(const pmpy_call *a, uint32_t of_a, const pmpy_call *b, uint32_t of_b) {
  if (a->cuda && a->device != b->device) return 0;
  for (uint32_t i = 0; i < a->n_out_given; i++) {
    const extent out = extent_of(&a->out[i]);
    for (uint32_t k = 0; k < b->n_in + b->n_out_given; k++) {
      const bool in = k < b->n_in;
      const pmpy_buffer *other = in ? &b->in[k] : &b->out[k - b->n_in];
      const uint64_t shared = common(out, extent_of(other));
      if (!shared) continue;
      char x[32], y[32];
      PyErr_Format(
          PyExc_ValueError,
          "kernel %U: %s of device %u and %s of device %u share %llu bytes of memory: each "
          "device of a mesh needs outputs of its own",
          a->name, pmpy_which(-(int)i - 1, x), of_a,
          pmpy_which(in ? (int)k : -(int)(k - b->n_in) - 1, y), of_b, (unsigned long long)shared);
      return -1;
    }
  }
  return 0;
}
