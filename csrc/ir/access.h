/* What an op touches besides values: memory, barriers, semaphores, counters.
 *
 * The roles of operands in ops.def say most of it. Attributes add the proxy (the engine of a copy),
 * the scope (a copy along axes of the cluster, a barrier of a cluster) and what is conditional.
 * Passes and the CUDA generator ask here; the interpreter does not: it records what its memory
 * functions touch, and a test compares the two. */
#ifndef PM_ACCESS_H
#define PM_ACCESS_H

#include "ir.h"

/* ---- ops ------------------------------------------------------------------------------------ */

/* No effects and no operand with a role: it may move, merge, and go if its result is not used. */
static inline bool pm_is_pure(int code) {
  return !pm_ops[code].effects && !pm_op_lookups[code].touches;
}
/* Do the lanes of a thread synchronise there, and no others? */
bool pm_meets(int code);

/* ---- accesses ------------------------------------------------------------------------------- */

/* Where an access is; bits, so that a set of them is a mask. */
enum {
  PM_IN_GMEM = 1,
  PM_IN_SMEM = 2,
  PM_IN_ACC = 4,
  PM_IN_BARRIER = 8, /* an mbarrier: its count of arrivals, its phase */
  PM_IN_PHASE = 16,  /* the bit of a thread that tells which phase of a barrier it awaits next */
  PM_IN_SEMAPHORE = 32,
  PM_IN_COUNTER = 64, /* of the launch: attribute N */
  PM_IN_TMEM = 128,
  PM_IN_MEMORY = PM_IN_GMEM | PM_IN_SMEM
};

/* UNKNOWN: the engine of the copy is not chosen yet; nothing may depend on it. */
typedef enum pm_proxy { PM_GENERIC, PM_ASYNC, PM_UNKNOWN } pm_proxy;
/* THREAD: memory of the Pallas thread alone; CLUSTER: also, or only, memory of other blocks of the
 * cluster; DEVICE: global memory; PEERS: that of other devices of the mesh, too */
typedef enum pm_scope { PM_THREAD, PM_BLOCK, PM_CLUSTER, PM_DEVICE, PM_PEERS } pm_scope;
/* MUST: all elements of the view. MAY: a predicate, a mask or a branch decides. UNTOLD: source text
 * decides, which nobody reads. */
typedef enum pm_certainty { PM_MUST, PM_MAY, PM_UNTOLD } pm_certainty;

typedef struct pm_access {
  pm_opid op;
  pm_val view;   /* the ref, barrier or semaphore, not its base; 0: a counter */
  uint8_t where; /* one of PM_IN_ ...; 0: there is no further access */
  bool reads, writes;
  uint8_t proxy, scope, certainty;
  uint8_t completion; /* pm_completion: when it is complete */
  /* pm_next_access's own */
  uint32_t k, extra;
} pm_access;

/*     pm_access a = pm_accesses(op);
 *     while (pm_next_access(g, &a)) ...
 *
 * lists the accesses of an op in the order of its operands. An op with regions has none; the ops
 * inside have theirs. Scratch is not listed: an op that uses it synchronises its lanes itself. */
static inline pm_access pm_accesses(pm_opid op) { return (pm_access){.op = op}; }
bool pm_find_access(const pm_graph *g, pm_access *a);
static inline bool pm_next_access(const pm_graph *g, pm_access *a) {
  return pm_op_lookups[pm_get(g, a->op)->code].touches && pm_find_access(g, a);
}

/* What the regions of an op access, each access once (by view and kind), in program order. MUST:
 * whenever the op is executed; MAY: in some branches or iterations only. Op 0 is the kernel. A
 * summary is made on first request and kept; while summaries are in use, no op with accesses may be
 * added. */
typedef struct pm_access_list {
  PM_VEC(pm_access) all;
  bool known;
} pm_access_list;
typedef struct pm_summaries {
  const pm_graph *g;
  pm_access_list *of; /* per op */
  uint32_t *first;    /* per value: access.c's own */
} pm_summaries;
pm_summaries *pm_new_summaries(const pm_graph *g);
const pm_access_list *pm_accesses_inside(pm_summaries *s, pm_opid op);
/* The value at the root of a chain of views that stands for the memory: of an output that aliases
 * an operand it is the operand. */
pm_val pm_memory_of(const pm_graph *g, pm_val view);

/* Do the lanes load or store an array, whole or where a mask is true (no atomic, no engine)? Then
 * *array is it and *a the access of memory. */
bool pm_moves_array(const pm_graph *g, pm_opid op, pm_access *a, pm_val *array);

/* The bytes [from, to) that an access of memory may touch, counted from the base of its view: as
 * they lie in memory if `physical`, else in row-major order. An upper bound: a dynamic start may
 * have any value in its range. False: the view cannot be resolved. */
bool pm_access_bytes(const pm_graph *g, const pm_access *a, bool physical, int64_t *from,
                     int64_t *to);

/* Is it source text, which may do anything to what it gets? */
static inline bool pm_is_source(const pm_graph *g, pm_opid op) {
  return pm_has_attr(g, op, PM_ATTR_INTERPRET);
}

/* Does the op wait until at most *n wgmma groups are pending? -1: it does not. */
bool pm_awaits_products(const pm_graph *g, pm_opid op, int64_t *n);

/* By the lanes of the thread, rather than an engine? The engine must be known. */
bool pm_by_lanes(const pm_access *a);

#endif
