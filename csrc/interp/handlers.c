/* The handler of each op. This is the one place that knows them all: the encoders of regions,
 * reductions and views find them in the compiler. */
#include "vm.h"

static const handler *const reductions[PM_REDUCE_COUNT] = {
    [PM_REDUCE_ADD] = &pm_vm_ADD,       [PM_REDUCE_MAX] = &pm_vm_MAX, [PM_REDUCE_MIN] = &pm_vm_MIN,
    [PM_REDUCE_MUL] = &pm_vm_MUL,       [PM_REDUCE_ANY] = &pm_vm_OR,  [PM_REDUCE_ALL] = &pm_vm_AND,
    [PM_REDUCE_ANY_IN_WARP] = &pm_vm_OR};

/* An op without a handler does not compile. */
static const handler *const ops[PM_OP_COUNT] = {
#define PM_OP(id, text, in, names, out, regions, attrs, type, layout, effects, participants, \
              known_to, completion, warp, needs, doc)                                        \
  [PM_OP_##id] = &pm_vm_##id,
#include "../ir/ops.def"
#undef PM_OP
};

const handlers pm_vm_handlers = {
    .ops = ops,
    .reductions = reductions,
    .move = pm_vm_move,
    .jump = pm_vm_jump,
    .next = pm_vm_next,
    .leave = pm_vm_leave,
    .warp_end = pm_vm_warp_end,
    .end = pm_vm_end,
};
