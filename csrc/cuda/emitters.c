/* The emitter of each op. This is the one place that knows them all: code that prints the ops of a
 * region finds them in pm_gen. */
#include "gen.h"

const pm_emitter pm_emitters[PM_OP_COUNT] = {
#define PM_OP(id, text, in, names, out, regions, attrs, type, layout, effects, participants, \
              known_to, completion, warp, needs, doc)                                        \
  [PM_OP_##id] = pm_cuda_##id,
#include "../ir/ops.def"
#undef PM_OP
};
