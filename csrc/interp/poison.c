/* Memory that was never written, and what becomes of it.
 *
 * Each byte of a thread's frame, of SMEM and of the arguments that the kernel writes has a byte
 * beside it: 0, or the number of the allocation that it comes from without ever having been
 * written. Before an instruction is executed, its rule works out the bytes of its result:
 * instructions that move elements are executed on these bytes as well, in an element-wise one an
 * element comes from what one of its operands comes from, an element of a product from its row or
 * its column. Copies carry them, late and early as the data.
 *
 * It is an error where such a value decides a branch, an address or a mask, or a count that a
 * thread signals or waits for; and where it is in an output at the end of the launch. An element of
 * an output that nobody wrote is none: its byte is FRESH. What is masked or clipped away is not
 * looked at. A select takes the byte of the operand that it takes, and `and`, `or` and products
 * with zero do as well where one operand decides alone. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "races.h"

enum { FRESH = 255, OUTSIDE = PM_POISON_OUTSIDE, MOST_ORIGINS = 250, MOST_STORES = 16 };

typedef uint8_t flag;

/* An allocation. */
typedef struct origin {
  const char *name;
  pm_opid op;
} origin;

/* Bytes of an argument that an op wrote, with some that were never written among them. */
typedef struct stored {
  pm_opid op;
  size_t from, to;
} stored;

struct poison {
  flag **smem; /* by block */
  flag **tmem; /* by block, as block.tmem */
  flag **args; /* by argument; NULL: all of it is defined, or another one's memory */
  stored (*stores)[MOST_STORES]; /* by argument, the latest last */
  origin origins[MOST_ORIGINS + 1];
  uint32_t n_origins; /* from 1 */
  flag *scratch;
  size_t scratch_bytes;
};

static flag *flags(const thread *t, uint32_t slot) { return t->poison + slot; }

/* The first that is set, or 0. */
static flag any(const flag *p, size_t n) {
  while (n >= 8) {
    uint64_t word;
    memcpy(&word, p, 8);
    if (word) break;
    p += 8;
    n -= 8;
  }
  while (n && !*p) p++, n--;
  return n ? *p : 0;
}

static flag *scratch(pm_machine *m, size_t bytes) {
  struct poison *p = m->poison;
  if (bytes <= p->scratch_bytes) return p->scratch;
  flag *at = pm_realloc(p->scratch, bytes);
  if (!at) {
    pm_fail(m->err, PM_E_MEMORY, "no memory to look for what was never written");
    return NULL;
  }
  p->scratch = at;
  p->scratch_bytes = bytes;
  return at;
}

/* ---- origins ------------------------------------------------------------------------------ */

static flag number_of(pm_machine *m, const char *name, pm_opid op) {
  struct poison *p = m->poison;
  for (uint32_t k = 1; k <= p->n_origins; k++) {
    if (p->origins[k].op == op && p->origins[k].name == name) return (flag)k;
  }
  if (p->n_origins == MOST_ORIGINS) return (flag)MOST_ORIGINS;
  p->origins[++p->n_origins] = (origin){name, op};
  return (flag)p->n_origins;
}

static const char *origin_text(const pm_machine *m, flag x, char *buf, size_t n) {
  char place[600] = "";
  if (x == OUTSIDE) {
    snprintf(buf, n, "a read out of bounds");
    return buf;
  }
  const origin *o = &m->poison->origins[x];
  if (m->places[o->op].file) pm_vm_place(m, o->op, place, sizeof place);
  snprintf(buf, n, "'%s'%s%s", o->name, *place ? ", allocated" : "", place);
  return buf;
}

static step fail(pm_machine *m, const thread *t, const instr *i, flag x, const char *what) {
  char text[700];
  return pm_vm_fail(m, t, i->op, PM_E_UNINITIALIZED, "%s was never written: it comes from %s", what,
                    origin_text(m, x, text, sizeof text));
}

static step sink(pm_machine *m, thread *t, const instr *i, uint32_t slot, size_t bytes,
                 const char *what) {
  const flag x = slot ? any(flags(t, slot), bytes) : 0;
  return x ? fail(m, t, i, x, what) : STEP_NEXT;
}

/* ---- memory ------------------------------------------------------------------------------- */

/* The first of the arguments of all devices that is the memory of the located. */
static uint32_t root_of(const pm_machine *m, const located *s) {
  uint32_t root = 0;
  while (m->buffers[root] != s->base) root++;
  return root;
}

/* The bytes beside a view; false: all of it is defined. */
static bool beside(const pm_machine *m, const thread *t, const located *s, located *p) {
  const access *mem = s->mem;
  *p = *s;
  if (mem->kind == PM_ARRAY || mem->space == PM_ACC) {
    p->base = (char *)t->poison + (s->base - t->frame);
  } else if (mem->space == PM_SMEM) {
    const block *b = t->block;
    if (s->base < b->smem || s->base >= b->smem + m->smem_bytes) b = b->cluster->blocks;
    while (s->base < b->smem || s->base >= b->smem + m->smem_bytes) b++;
    p->base = (char *)m->poison->smem[b - m->blocks] + (s->base - b->smem);
  } else {
    const uint32_t root = root_of(m, s);
    p->base = (char *)m->poison->args[root];
    if (!p->base) return false;
  }
  p->at = s->at ? p->base + (s->at - s->base) : NULL;
  return true;
}

/* What is read of an output that nobody wrote comes from that output. */
static void name_fresh(pm_machine *m, const located *s, flag *p, size_t n) {
  if (s->mem->space != PM_GMEM || !memchr(p, FRESH, n)) return;
  const flag x = number_of(m, s->mem->name, 0);
  for (size_t k = 0; k < n; k++) p[k] = p[k] == FRESH ? x : p[k];
}

/* To p, the bytes of elements from <= k < to, at their places among all. */
static void read_flags(pm_machine *m, const thread *t, const located *s, int64_t from, int64_t to,
                       flag *p) {
  located b;
  const size_t bytes = (size_t)s->mem->n * s->mem->bytes;
  const bool tracked = beside(m, t, s, &b);
  if (!s->inside) {
    memset(p, OUTSIDE, bytes);
    if (tracked) pm_vm_gather_inside(&b, true, p);
    else pm_vm_clear_inside(s, true, p);
  } else if (!tracked) {
    memset(p, 0, bytes);
  } else {
    pm_vm_gather_part(&b, from, to, p);
  }
  if (tracked) name_fresh(m, s, p + from * s->mem->bytes, (size_t)(to - from) * s->mem->bytes);
}

static void note_store(pm_machine *m, const located *s, pm_opid op, const flag *p, size_t n) {
  const access *mem = s->mem;
  if (mem->space != PM_GMEM || !any(p, n)) return;
  const uint32_t root = root_of(m, s);
  stored *at = m->poison->stores[root], x = {.op = op, .to = m->args[root % m->n_args].bytes};
  if (s->inside) {
    x.from = (size_t)(s->at - s->base);
    x.to = x.from + mem->bytes;
    for (uint32_t k = 0; k < mem->n_loops; k++) {
      x.to += (size_t)((mem->loop_size[k] - 1) * mem->loop_stride[k]) * mem->bytes;
    }
  }
  stored *last = &at[MOST_STORES - 1];
  if (last->op == op) {
    last->from = last->from < x.from ? last->from : x.from;
    last->to = last->to > x.to ? last->to : x.to;
    return;
  }
  memmove(at, at + 1, (MOST_STORES - 1) * sizeof *at);
  *last = x;
}

static void write_flags(pm_machine *m, const thread *t, const located *s, int64_t from, int64_t to,
                        pm_opid op, const flag *p) {
  located b;
  if (!beside(m, t, s, &b)) return;
  if (s->inside) {
    pm_vm_scatter_part(&b, from, to, p);
  } else {
    pm_vm_scatter_inside(&b, p);
  }
  note_store(m, s, op, p + from * s->mem->bytes, (size_t)(to - from) * s->mem->bytes);
}

/* The numbers that decide where an access is. */
static step check_address(pm_machine *m, thread *t, const instr *i, const access *mem) {
  const char what[] = "a number that decides where this access is";
  for (uint32_t k = 0; k < mem->n_starts; k++) {
    if (sink(m, t, i, mem->starts[k], 4, what) == STEP_FAIL) return STEP_FAIL;
  }
  for (uint32_t k = 0; k < mem->n_terms; k++) {
    if (sink(m, t, i, mem->terms[k].slot, 4, what) == STEP_FAIL) return STEP_FAIL;
  }
  return sink(m, t, i, mem->cluster_slot, 4, what);
}

static step check_addresses(pm_machine *m, thread *t, const instr *i) {
  const access *const all[] = {i->mem, i->mem2, i->mem3};
  for (uint32_t k = 0; k < PM_COUNT(all); k++) {
    if (all[k] && check_address(m, t, i, all[k]) == STEP_FAIL) return STEP_FAIL;
  }
  return STEP_NEXT;
}

/* ---- rules: elements ---------------------------------------------------------------------- */

/* The instruction itself, on the bytes beside the frame. */
step pm_poison_rule_moves(pm_machine *m, thread *t, const instr *i) {
  char *frame = t->frame;
  t->frame = (char *)t->poison;
  const step s = i->exec(m, t, i);
  t->frame = frame;
  return s == STEP_FAIL ? STEP_FAIL : STEP_NEXT;
}

step pm_poison_rule_defined(pm_machine *m, thread *t, const instr *i) {
  (void)m;
  if (i->dst) memset(flags(t, i->dst), 0, i->n ? i->n * pm_dtypes[i->out].bytes : 8);
  return STEP_NEXT;
}

/* Operands of a pointwise instruction. */
typedef struct operands {
  uint32_t n;
  const flag *at[3];
  const char *value[3];
  uint32_t step[3], bytes[3]; /* step 0: one for all elements */
  bool any;
} operands;

static operands operands_of(const thread *t, const instr *i) {
  const uint32_t slots[] = {i->a, i->b, i->c};
  operands o = {.n = i->c ? 3 : i->b ? 2 : 1};
  for (uint32_t k = 0; k < o.n; k++) {
    o.bytes[k] = pm_dtypes[i->c && k == 0 ? PM_BOOL : i->dtype].bytes;
    o.step[k] = i->flags & 1 << k ? 0 : o.bytes[k]; /* SPLAT_X ... */
    o.at[k] = flags(t, slots[k]);
    o.value[k] = t->frame + slots[k];
    o.any |= any(o.at[k], o.step[k] ? (size_t)i->n * o.bytes[k] : o.bytes[k]) != 0;
  }
  return o;
}

/* Is the element of an operand all zeros, and known to be? */
static bool is_zero(const operands *o, uint32_t k, uint32_t e) {
  static const char zeros[8];
  return !o->at[k][(size_t)e * o->step[k]] &&
         !memcmp(o->value[k] + (size_t)e * o->step[k], zeros, o->bytes[k]);
}

static bool is_one(const operands *o, uint32_t k, uint32_t e) {
  return !o->at[k][(size_t)e * o->step[k]] && o->value[k][(size_t)e * o->step[k]] == 1;
}

static flag either(const operands *o, uint32_t e) {
  for (uint32_t k = 0; k < o->n; k++) {
    const flag x = o->at[k][(size_t)e * o->step[k]];
    if (x) return x;
  }
  return 0;
}

/* Of a result that two operands decide, and sometimes one of them alone. */
typedef enum decided { BY_ALL, BY_A_ZERO, BY_A_ONE } decided;

static void pointwise(const thread *t, const instr *i, decided by) {
  const operands o = operands_of(t, i);
  const uint32_t bytes = pm_dtypes[i->out].bytes;
  flag *out = flags(t, i->dst);
  memset(out, 0, (size_t)i->n * bytes);
  for (uint32_t e = 0; o.any && e < i->n; e++) {
    if (by == BY_A_ZERO && (is_zero(&o, 0, e) || is_zero(&o, 1, e))) continue;
    if (by == BY_A_ONE && (is_one(&o, 0, e) || is_one(&o, 1, e))) continue;
    memset(out + (size_t)e * bytes, either(&o, e), bytes);
  }
}

step pm_poison_rule_pointwise(pm_machine *m, thread *t, const instr *i) {
  (void)m;
  pointwise(t, i, BY_ALL);
  return STEP_NEXT;
}

step pm_poison_rule_and(pm_machine *m, thread *t, const instr *i) {
  (void)m;
  pointwise(t, i, pm_is_float(i->dtype) ? BY_ALL : BY_A_ZERO);
  return STEP_NEXT;
}

step pm_poison_rule_or(pm_machine *m, thread *t, const instr *i) {
  (void)m;
  pointwise(t, i, i->dtype == PM_BOOL ? BY_A_ONE : BY_ALL);
  return STEP_NEXT;
}

step pm_poison_rule_select(pm_machine *m, thread *t, const instr *i) {
  const operands o = operands_of(t, i);
  const uint32_t bytes = pm_dtypes[i->out].bytes;
  flag *out = flags(t, i->dst);
  (void)m;
  memset(out, 0, (size_t)i->n * bytes);
  for (uint32_t e = 0; o.any && e < i->n; e++) {
    const flag p = o.at[0][(size_t)e * o.step[0]];
    const uint32_t k = o.value[0][(size_t)e * o.step[0]] ? 1 : 2;
    memset(out + (size_t)e * bytes, p ? p : o.at[k][(size_t)e * o.step[k]], bytes);
  }
  return STEP_NEXT;
}

step pm_poison_rule_convert(pm_machine *m, thread *t, const instr *i) {
  const uint32_t from = pm_dtypes[i->dtype].bytes, to = pm_dtypes[i->out].bytes;
  const flag *in = flags(t, i->a);
  flag *out = flags(t, i->dst);
  (void)m;
  memset(out, 0, (size_t)i->n * to);
  if (!any(in, (size_t)i->n * from)) return STEP_NEXT;
  for (uint32_t e = 0; e < i->n; e++) memset(out + (size_t)e * to, in[(size_t)e * from], to);
  return STEP_NEXT;
}

step pm_poison_rule_unpack(pm_machine *m, thread *t, const instr *i) {
  (void)m;
  for (uint32_t e = 0; e < i->n; e++) flags(t, i->dst)[e] = flags(t, i->a)[e / 2];
  return STEP_NEXT;
}

step pm_poison_rule_pack(pm_machine *m, thread *t, const instr *i) {
  const flag *in = flags(t, i->a);
  (void)m;
  for (uint32_t e = 0; e < i->n; e++) {
    flags(t, i->dst)[e] = in[2 * e] ? in[2 * e] : in[2 * e + 1];
  }
  return STEP_NEXT;
}

/* ---- rules: reductions, indices, products --------------------------------------------------- */

/* One flag for each element, in scratch; NULL: none is set, or no memory. */
static flag *by_element(pm_machine *m, const flag *in, size_t n, size_t bytes) {
  flag *at = any(in, n * bytes) ? scratch(m, n) : NULL;
  for (size_t k = 0; at && k < n; k++) at[k] = in[k * bytes];
  return at;
}

static void spread(const flag *in, size_t n, size_t bytes, flag *out) {
  for (size_t k = 0; k < n; k++) memset(out + k * bytes, in[k], bytes);
}

step pm_poison_rule_reduce(pm_machine *m, thread *t, const instr *i) {
  const reduction *r = i->reduction;
  const size_t from = pm_dtypes[i->dtype].bytes;
  flag *work = by_element(m, flags(t, i->a), i->n, from), *out = flags(t, i->dst);
  memset(out, 0, (size_t)r->n_out * from);
  for (uint32_t g = 0; work && g < r->n; g++) {
    const size_t inner = (size_t)r->group[g].inner, size = (size_t)r->group[g].size;
    for (int64_t o = 0; o < r->group[g].outer; o++) {
      const flag *at = work + (size_t)o * size * inner;
      for (size_t j = 0; j < inner; j++) {
        flag x = 0;
        for (size_t k = 0; !x && k < size; k++) x = at[k * inner + j];
        work[(size_t)o * inner + j] = x;
      }
    }
  }
  if (work) spread(work, (size_t)r->n_out, from, out);
  return STEP_NEXT;
}

step pm_poison_rule_scan(pm_machine *m, thread *t, const instr *i) {
  const reduction *r = i->reduction;
  const size_t bytes = pm_dtypes[i->dtype].bytes, inner = (size_t)r->group[0].inner;
  flag *work = by_element(m, flags(t, i->a), i->n, bytes), *at = work;
  memset(flags(t, i->dst), 0, i->n * bytes);
  for (int64_t o = 0; work && o < r->group[0].outer; o++, at += inner) {
    for (int64_t k = 1; k < r->group[0].size; k++, at += inner) {
      for (size_t j = 0; j < inner; j++) {
        if (!at[inner + j]) at[inner + j] = at[j];
      }
    }
  }
  if (work) spread(work, i->n, bytes, flags(t, i->dst));
  return STEP_NEXT;
}

step pm_poison_rule_gather(pm_machine *m, thread *t, const instr *i) {
  const size_t bytes = pm_dtypes[i->dtype].bytes;
  const int32_t *index = slot_of(t, i->b);
  const flag *from = flags(t, i->a), *at = flags(t, i->b);
  (void)m;
  for (uint32_t k = 0; k < i->n; k++) {
    const int64_t e = pm_max(0, pm_min((int64_t)index[k], (int64_t)i->to - 1));
    memset(flags(t, i->dst) + k * bytes, at[4 * k] ? at[4 * k] : from[(size_t)e * bytes], bytes);
  }
  return STEP_NEXT;
}

step pm_poison_rule_scatter(pm_machine *m, thread *t, const instr *i) {
  const size_t bytes = pm_dtypes[i->dtype].bytes;
  const int32_t *index = slot_of(t, i->b);
  const flag *from = flags(t, i->c), *at = flags(t, i->b), unknown = any(at, 4 * (size_t)i->n);
  flag *to = flags(t, i->dst);
  (void)m;
  memcpy(to, flags(t, i->a), i->to * bytes);
  if (unknown) memset(to, unknown, i->to * bytes);
  for (uint32_t k = 0; !unknown && k < i->n; k++) {
    if (index[k] < 0 || (uint32_t)index[k] >= i->to) continue;
    memset(to + (size_t)index[k] * bytes, from[k * bytes], bytes);
  }
  return STEP_NEXT;
}

/* acc[rows][cols] += a[rows][k] @ b[k][cols]: the flags of all, row-major. */
static void product(flag *acc, size_t acc_bytes, const flag *a, size_t a_bytes, const flag *b,
                    size_t b_bytes, int64_t rows, int64_t cols, int64_t k) {
  const bool left = any(a, (size_t)(rows * k) * a_bytes);
  const bool right = any(b, (size_t)(k * cols) * b_bytes);
  for (int64_t r = 0; left && r < rows; r++) {
    const flag x = any(a + (size_t)(r * k) * a_bytes, (size_t)k * a_bytes);
    if (x) memset(acc + (size_t)(r * cols) * acc_bytes, x, (size_t)cols * acc_bytes);
  }
  for (int64_t e = 0; right && e < k * cols; e++) {
    const flag x = b[(size_t)e * b_bytes];
    for (int64_t r = 0; x && r < rows; r++) {
      memset(acc + (size_t)(r * cols + e % cols) * acc_bytes, x, acc_bytes);
    }
  }
}

step pm_poison_rule_mma(pm_machine *m, thread *t, const instr *i) {
  const size_t out = pm_dtypes[i->out].bytes, bytes = pm_dtypes[i->dtype].bytes;
  (void)m;
  memcpy(flags(t, i->dst), flags(t, i->a), i->n * out);
  product(flags(t, i->dst), out, flags(t, i->b), bytes, flags(t, i->c), bytes, i->n / i->to, i->to,
          i->depth);
  return STEP_NEXT;
}

/* ---- rules: memory ------------------------------------------------------------------------ */

step pm_poison_rule_load(pm_machine *m, thread *t, const instr *i) {
  located s;
  if (check_addresses(m, t, i) == STEP_FAIL) return STEP_FAIL;
  pm_vm_locate(m, t, i->mem, &s);
  if (s.base) read_flags(m, t, &s, 0, i->mem->n, flags(t, i->dst));
  return STEP_NEXT;
}

step pm_poison_rule_store(pm_machine *m, thread *t, const instr *i) {
  located s;
  if (check_addresses(m, t, i) == STEP_FAIL) return STEP_FAIL;
  pm_vm_locate(m, t, i->mem, &s);
  if (s.inside) write_flags(m, t, &s, 0, i->mem->n, i->op, flags(t, i->a));
  return STEP_NEXT;
}

/* To all devices, or from any of them. */
step pm_poison_rule_everywhere(pm_machine *m, thread *t, const instr *i) {
  located s;
  if (check_addresses(m, t, i) == STEP_FAIL) return STEP_FAIL;
  pm_vm_locate(m, t, i->mem, &s);
  flag *part = i->a ? NULL : scratch(m, (size_t)i->n * i->mem->bytes);
  const size_t n = (size_t)i->n * i->mem->bytes;
  if (!i->a) memset(flags(t, i->dst), 0, n);
  for (uint32_t d = 0; s.inside && d < m->n_devices; d++) {
    located there = pm_vm_on_device(m, &s, d);
    if (i->a) {
      write_flags(m, t, &there, 0, i->mem->n, i->op, flags(t, i->a));
      continue;
    }
    if (!part) return STEP_FAIL;
    read_flags(m, t, &there, 0, i->mem->n, part);
    for (size_t k = 0; k < n; k++) flags(t, i->dst)[k] |= part[k];
  }
  return STEP_NEXT;
}

step pm_poison_mask(pm_machine *m, thread *t, const instr *i, uint32_t slot, uint32_t element) {
  const flag x = flags(t, slot)[element];
  return x ? fail(m, t, i, x, "the mask of an element of this access") : STEP_NEXT;
}

step pm_poison_index(pm_machine *m, thread *t, const instr *i, uint32_t slot, int64_t element) {
  const flag x = flags(t, slot)[4 * element];
  return x ? fail(m, t, i, x, "an index of this access") : STEP_NEXT;
}

void pm_poison_element(pm_machine *m, thread *t, const instr *i, const located *s, const char *at,
                       uint32_t value, uint32_t old) {
  const size_t bytes = s->mem->bytes;
  located p;
  flag *mem = beside(m, t, s, &p) ? (flag *)p.base + (at - s->base) : NULL, x = mem ? *mem : 0;
  name_fresh(m, s, &x, 1);
  if (old) memset(flags(t, old), x, bytes);
  if (!value) return;
  const flag y = *flags(t, value), z = y ? y : old ? x : 0;
  if (!mem) return;
  memset(mem, z, bytes);
  note_store(m, s, i->op, mem, bytes);
}

/* Of a copy the predicate, else how many a thread signals or waits for. */
step pm_poison_rule_counts(pm_machine *m, thread *t, const instr *i) {
  if (check_addresses(m, t, i) == STEP_FAIL) return STEP_FAIL;
  if (pm_poison_rule_defined(m, t, i) == STEP_FAIL) return STEP_FAIL;
  return sink(m, t, i, i->a, 1, "a number that decides what this does");
}

step pm_poison_rule_addresses(pm_machine *m, thread *t, const instr *i) {
  pm_poison_rule_defined(m, t, i);
  return check_addresses(m, t, i);
}

void pm_poison_acc_load(pm_machine *m, thread *t, const instr *i, const located *s) {
  located p;
  beside(m, t, s, &p);
  pm_vm_gather(&p, flags(t, i->dst));
}

step pm_poison_rule_nothing(pm_machine *m, thread *t, const instr *i) {
  (void)m, (void)t, (void)i;
  return STEP_NEXT;
}

step pm_poison_rule_acc_store(pm_machine *m, thread *t, const instr *i) {
  located s, p;
  pm_vm_locate(m, t, i->mem, &s);
  beside(m, t, &s, &p);
  pm_vm_scatter(&p, flags(t, i->a));
  return STEP_NEXT;
}

/* What the function makes is defined. */
step pm_poison_rule_inline(pm_machine *m, thread *t, const instr *i) {
  const inlined *x = i->inlined;
  for (uint32_t k = 0; k < x->n_in + x->n_out; k++) {
    const struct inlined_value *v = &x->value[k];
    if (v->mem && check_address(m, t, i, v->mem) == STEP_FAIL) return STEP_FAIL;
    if (k >= x->n_in) memset(flags(t, v->slot), 0, (size_t)v->bytes);
  }
  return STEP_NEXT;
}

void pm_poison_defined(pm_machine *m, const thread *t, const located *s) {
  located p;
  flag *zeros = beside(m, t, s, &p) ? scratch(m, (size_t)s->mem->n * s->mem->bytes) : NULL;
  if (!zeros) return;
  memset(zeros, 0, (size_t)s->mem->n * s->mem->bytes);
  pm_vm_scatter(&p, zeros);
}

/* ---- rules: control ----------------------------------------------------------------------- */

step pm_poison_rule_branch(pm_machine *m, thread *t, const instr *i) {
  return sink(m, t, i, i->a, 1, "the condition of this branch");
}

step pm_poison_rule_switch(pm_machine *m, thread *t, const instr *i) {
  return sink(m, t, i, i->a, 4, "the number of this branch");
}

step pm_poison_rule_for(pm_machine *m, thread *t, const instr *i) {
  if (sink(m, t, i, i->a, 4, "the first number of this loop") == STEP_FAIL) return STEP_FAIL;
  return sink(m, t, i, i->b, 4, "the end of this loop");
}

step pm_poison_rule_check(pm_machine *m, thread *t, const instr *i) {
  return sink(m, t, i, i->printing->arg[0].slot, 1, "the condition of this debug_check");
}

/* ---- engines ------------------------------------------------------------------------------ */

step pm_poison_copy_in(pm_machine *m, const task *k) {
  const access *to = k->smem.mem;
  flag *p = scratch(m, (size_t)to->n * to->bytes);
  if (!p) return STEP_FAIL;
  const flag outside = k->i->flags == PM_OOB_UNDEFINED ? OUTSIDE : 0;
  if (k->gmem.inside) {
    read_flags(m, k->owner, &k->gmem, k->from, k->to, p);
  } else {
    located b;
    memset(p, outside, (size_t)to->n * to->bytes);
    if (beside(m, k->owner, &k->gmem, &b)) pm_vm_gather_inside(&b, false, p);
    else pm_vm_clear_inside(&k->gmem, false, p);
    name_fresh(m, &k->gmem, p, (size_t)to->n * to->bytes);
  }
  write_flags(m, k->owner, &k->smem, k->from, k->to, k->i->op, p);
  return STEP_NEXT;
}

void pm_poison_read(pm_machine *m, const task *k, char *p) {
  read_flags(m, k->owner, &k->smem, 0, k->smem.mem->n, (flag *)p);
}

/* What a copy or a store brings goes to memory, beside what is there if they are combined. */
step pm_poison_write(pm_machine *m, const task *k, const located *s, char *p, bool combine) {
  const size_t n = (size_t)s->mem->n * s->mem->bytes;
  flag *brought = (flag *)p;
  if (combine) {
    flag *old = scratch(m, n);
    if (!old) return STEP_FAIL;
    read_flags(m, k->owner, s, 0, s->mem->n, old);
    for (size_t e = 0; e < n; e++) brought[e] = brought[e] ? brought[e] : old[e];
  }
  write_flags(m, k->owner, s, 0, s->mem->n, k->i->op, brought);
  return STEP_NEXT;
}

void pm_poison_take(const thread *t, uint32_t slot, char *p, size_t bytes) {
  memcpy(p, flags(t, slot), bytes);
}

/* Whatever becomes of the result, an operand of which no byte was ever written is a mistake. */
static step check_operand(pm_machine *m, const thread *t, const instr *i, const located *s,
                          const flag *p) {
  const size_t n = (size_t)s->mem->n * s->mem->bytes;
  if (!n || *p == OUTSIDE || memchr(p, 0, n)) return STEP_NEXT;
  return fail(m, t, i, *p, "an operand of the product");
}

step pm_poison_operand(pm_machine *m, const thread *t, const instr *i, const located *s) {
  const flag *p = (const flag *)pm_poison_bytes(m, t, s);
  return p ? check_operand(m, t, i, s, p) : STEP_FAIL;
}

step pm_poison_product(pm_machine *m, const task *k, const char *array) {
  const access *acc = k->acc.mem, *right = k->rhs.mem;
  const int64_t rows = acc->dim[0], cols = acc->dim[1], depth = right->dim[0];
  const size_t a = (size_t)(rows * depth) * pm_dtypes[k->i->out].bytes;
  const size_t b = (size_t)(depth * cols) * right->bytes, c = (size_t)(rows * cols) * acc->bytes;
  flag *p = scratch(m, a + b + c);
  located s;
  if (!p) return STEP_FAIL;
  if (k->lhs.mem) read_flags(m, k->owner, &k->lhs, 0, rows * depth, p);
  else memcpy(p, array, a);
  read_flags(m, k->owner, &k->rhs, 0, depth * cols, p + a);
  if (!any(p, a + b)) return STEP_NEXT;
  if ((k->lhs.mem && check_operand(m, k->owner, k->i, &k->lhs, p) == STEP_FAIL) ||
      check_operand(m, k->owner, k->i, &k->rhs, p + a) == STEP_FAIL)
    return STEP_FAIL;
  beside(m, k->owner, &k->acc, &s);
  pm_vm_gather(&s, p + a + b);
  product(p + a + b, acc->bytes, p, pm_dtypes[k->i->out].bytes, p + a, right->bytes, rows, cols,
          depth);
  pm_vm_scatter(&s, p + a + b);
  return STEP_NEXT;
}

/* ---- a run -------------------------------------------------------------------------------- */

void pm_poison_scope(pm_machine *m, const block *b, const struct smem_alloc *x, size_t at) {
  memset(m->poison->smem[b - m->blocks] + at, number_of(m, x->name, x->op),
         (size_t)x->n * pm_dtypes[x->dtype].bytes);
}

char *pm_poison_tmem(const pm_machine *m, const block *b) {
  return (char *)m->poison->tmem[b - m->blocks];
}

uint8_t pm_poison_number(pm_machine *m, const char *name, pm_opid op) {
  return number_of(m, name, op);
}

bool pm_poison_lines(pm_machine *m, const thread *t, const located *s, int dim, uint8_t *line) {
  const access *mem = s->mem;
  const int64_t n = mem->dim[dim], across = mem->dim[1 - dim];
  const size_t bytes = mem->bytes;
  flag *p = scratch(m, (size_t)mem->n * bytes);
  if (!p) return false;
  read_flags(m, t, s, 0, mem->n, p);
  memset(line, 0, (size_t)n);
  if (!any(p, (size_t)mem->n * bytes)) return true;
  for (int64_t k = 0; k < n; k++) {
    for (int64_t j = 0; j < across && !line[k]; j++) {
      line[k] = p[(size_t)(dim ? j * n + k : k * across + j) * bytes];
    }
  }
  return true;
}

const char *pm_poison_bytes(pm_machine *m, const thread *t, const located *s) {
  flag *p = scratch(m, (size_t)s->mem->n * s->mem->bytes);
  if (p) read_flags(m, t, s, 0, s->mem->n, p);
  return (const char *)p;
}

/* The marks of the bytes from `at` on, in the memory of a view; NULL: it has none. */
char *pm_poison_beside(const pm_machine *m, const thread *t, const located *s, const char *at) {
  located p;
  return beside(m, t, s, &p) ? p.base + (at - s->base) : NULL;
}

char *pm_poison_frame(const thread *t, uint32_t slot) { return (char *)flags(t, slot); }

static void *zeroed(size_t n, size_t bytes) {
  void *p = pm_malloc(n * bytes + 1);
  if (p) memset(p, 0, n * bytes);
  return p;
}

static bool make_args(pm_machine *m) {
  for (uint32_t k = 0; k < m->n_buffers; k++) {
    bool written = false, fresh = m->options.fresh_outputs;
    uint32_t root = 0;
    while (m->buffers[root] != m->buffers[k]) root++;
    if (root != k) continue;
    for (uint32_t j = k; j < m->n_buffers; j++) {
      if (m->buffers[j] != m->buffers[k]) continue;
      written |= m->args[j % m->n_args].written;
      fresh &= m->args[j % m->n_args].fresh;
    }
    if (!written) continue;
    m->poison->args[k] = zeroed(m->args[k % m->n_args].bytes, 1);
    if (!m->poison->args[k]) return false;
    if (fresh) memset(m->poison->args[k], FRESH, m->args[k % m->n_args].bytes);
  }
  return true;
}

bool pm_poison_begin(pm_machine *m) {
  const uint32_t blocks = m->n_clusters * m->n_blocks;
  struct poison *p = m->poison = zeroed(1, sizeof *p);
  if (!p) return false;
  p->smem = zeroed(blocks, sizeof *p->smem);
  p->tmem = zeroed(blocks, sizeof *p->tmem);
  p->args = zeroed(m->n_buffers, sizeof *p->args);
  p->stores = zeroed(m->n_buffers, sizeof *p->stores);
  if (!p->smem || !p->tmem || !p->args || !p->stores) return false;
  for (uint32_t k = 0; k < blocks; k++) {
    if (!(p->smem[k] = zeroed(m->smem_bytes, 1))) return false;
    if (!(p->tmem[k] = zeroed(PM_TMEM_LANES * 4 * (size_t)m->tmem_columns, 1))) return false;
  }
  for (uint32_t k = 0; k < pm_vm_agents(m); k++) {
    if (!(m->threads[k].poison = zeroed(m->frame_bytes, 1))) return false;
  }
  return make_args(m);
}

/* Of the launch: no output may hold what was never written. */
step pm_poison_check(pm_machine *m) {
  char text[700], at[256];
  for (uint32_t k = 0; k < m->n_buffers; k++) {
    const flag *p = m->poison->args[k];
    const arg *a = &m->args[k % m->n_args];
    size_t n = 0, first = 0;
    for (size_t e = 0; p && e < a->bytes; e += a->item) {
      if (!p[e] || p[e] == FRESH) continue;
      if (!n++) first = e;
    }
    if (!n) continue;
    pm_opid op = 0;
    for (const stored *s = m->poison->stores[k], *end = s + MOST_STORES; s < end; s++) {
      if (s->op && s->from <= first && first < s->to) op = s->op;
    }
    pm_fail(m->err, PM_E_UNINITIALIZED,
            "%s%s (%zu of its elements) holds a value that was never written: it comes from %s",
            a->name, pm_vm_index_text(a, first, at, sizeof at), n,
            origin_text(m, p[first], text, sizeof text));
    if (op && m->places[op].file) pm_err_at(m->err, m->places[op].file, m->places[op].line);
    return STEP_FAIL;
  }
  return STEP_NEXT;
}

void pm_poison_end(pm_machine *m) {
  struct poison *p = m->poison;
  if (!p) return;
  for (uint32_t k = 0; p->smem && k < m->n_clusters * m->n_blocks; k++) pm_free(p->smem[k]);
  for (uint32_t k = 0; p->tmem && k < m->n_clusters * m->n_blocks; k++) pm_free(p->tmem[k]);
  for (uint32_t k = 0; p->args && k < m->n_buffers; k++) pm_free(p->args[k]);
  for (uint32_t k = 0; k < pm_vm_agents(m); k++) {
    pm_free(m->threads[k].poison);
    m->threads[k].poison = NULL;
  }
  pm_free(p->smem);
  pm_free(p->tmem);
  pm_free(p->args);
  pm_free(p->stores);
  pm_free(p->scratch);
  pm_free(p);
  m->poison = NULL;
}

/* ---- discard ------------------------------------------------------------------------------ */

static step rule_discard(pm_machine *m, thread *t, const instr *i) {
  const size_t bytes = (size_t)i->mem->n * i->mem->bytes;
  located s, p;
  if (check_addresses(m, t, i) == STEP_FAIL) return STEP_FAIL;
  pm_vm_locate(m, t, i->mem, &s);
  if (!s.inside || !beside(m, t, &s, &p)) return STEP_NEXT;
  flag *fresh = scratch(m, bytes);
  if (!fresh) return STEP_FAIL;
  pm_vm_scatter(&p, memset(fresh, FRESH, bytes));
  return STEP_NEXT;
}

static step exec_discard(pm_machine *m, thread *t, const instr *i) {
  located s;
  pm_vm_locate(m, t, i->mem, &s);
  if (!s.inside) return pm_vm_outside(m, t, i->op, &s, "discard");
  if (m->races && pm_race_plain(m, t, i, &s, WRITE, THREAD) == STEP_FAIL) return STEP_FAIL;
  char *lost = pm_malloc((size_t)i->mem->n * i->mem->bytes + 1);
  if (!lost) return pm_vm_fail(m, t, i->op, PM_E_MEMORY, "no memory for a discard");
  pm_interp_fill(i->mem->dtype, false, lost, i->mem->n);
  pm_vm_scatter(&s, lost);
  pm_free(lost);
  return m->races && pm_race_stored(m) == STEP_FAIL ? STEP_FAIL : STEP_PAUSE;
}

const handler pm_vm_DISCARD = {pm_vm_encode_plain, exec_discard, {.poison = rule_discard}};
