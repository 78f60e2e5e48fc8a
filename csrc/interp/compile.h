/* What the encoders of ops (compile.c) share with what completes a program (program.c). */
#ifndef PM_COMPILE_H
#define PM_COMPILE_H

#include "vm.h"

typedef struct storage {
  size_t bytes, offset;
  uint32_t start, end; /* instructions */
  bool fixed;          /* offset is given, or it is small: no sharing */
  bool image;          /* a constant */
} storage;

typedef struct constant {
  uint32_t storage;
  uint8_t dtype;
  int64_t n;
  pm_scalar value;
  int64_t size, inner; /* of an iota: (index / inner) % size; size 0: the value */
} constant;

typedef struct usage {
  uint32_t storage, at;
} usage;
typedef struct span {
  uint32_t start, end;
} span;

struct compiler {
  const pm_graph *g;
  const handlers *known;
  pm_machine *m;
  pm_arena *temp;
  pm_err *err;
  pm_code status;
  uint32_t *slot;  /* per value: its storage, 0: none yet */
  uint32_t *splat; /* per value: the storage of the one number in every element, 0: not constant */
  uint32_t *alloc; /* per value, SMEM: byte offset; barriers: first barrier */
  uint32_t *apart; /* of SMEM: see access */
  bool *shared;    /* per value: an allocation that other blocks of the cluster reach */
  const char **files; /* per interned string: the machine's copy */
  PM_VEC(instr) code;
  PM_VEC(storage) storages;
  PM_VEC(usage) uses;
  PM_VEC(span) loops;
  PM_VEC(uint32_t *) fixups; /* storage numbers outside of instructions */
  PM_VEC(constant) constants;
  PM_VEC(scope *) scopes;
  PM_VEC(barrier_info) bars;
  PM_VEC(uint32_t) accs; /* storages of the accumulators of open scopes */
  struct open_scope {
    struct open_scope *outer;
    scope *scope;
    uint32_t smem_cap, bar_cap, sem_cap, tmem_cap;
    uint32_t first_acc;
  } * open, *whole;
  uint32_t n_barriers;
  PM_VEC(struct pair_op) pair_ops;
};

/* The code of the whole kernel, whose operands are still numbers of storages. */
void pm_vm_encode_all(compiler *c);

#endif
