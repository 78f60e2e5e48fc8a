/* Values of scalars that are known before the kernel runs: from constants, and from the index of
 * the Pallas thread. The only evaluator of ops by their opcode outside of the interpreter. */
#ifndef PM_EVAL_H
#define PM_EVAL_H

#include "ir.h"

/* ---- laws: columns of numbers.def ---------------------------------------------------------- */

typedef enum pm_law_commutes {
  PM_COMMUTES_NEVER,
  PM_COMMUTES_INTS,
  PM_COMMUTES_ALWAYS
} pm_law_commutes;
typedef enum pm_element {
  PM_ELEMENT_NO,
  PM_ELEMENT_ZERO,
  PM_ELEMENT_ONE,
  PM_ELEMENT_ANY_ONE,
  PM_ELEMENT_ONES
} pm_element;
typedef enum pm_law_like { PM_LIKE_NO, PM_LIKE_SAME, PM_LIKE_NOTHING } pm_law_like;
typedef struct pm_law {
  uint8_t commutes, unit, decides, like;
} pm_law;
extern const pm_law pm_laws[PM_OP_COUNT];
/* Is x that number of the dtype? */
bool pm_is_element(pm_element e, pm_dtype t, pm_scalar x);
/* f(x, y) = f(y, x), for operands of the dtype */
bool pm_commutes(pm_opcode code, pm_dtype t);

/* ---- values -------------------------------------------------------------------------------- */

enum { PM_EVAL_OPERANDS = 3 };
/* What an op of at most PM_EVAL_OPERANDS operands gives in every element, as its dtype holds it:
 * integers and bools, conversions, comparisons of floats, and what only moves. Each element of
 * operand k is x[k] if known[k], which have PM_EVAL_OPERANDS elements. False: it does not follow.
 */
bool pm_eval(const pm_graph *g, pm_opid op, const pm_scalar *x, const bool *known, pm_scalar *out);

/* The region of an IF or SWITCH for this value of its operand. */
uint32_t pm_chosen_region(const pm_op *branch, int64_t x);

/* The value of an int or bool scalar in this thread, if the thread's index determines it. */
bool pm_value_for_thread(const pm_graph *g, pm_val v, int64_t thread, int64_t *out);
/* The region of an IF or SWITCH that this thread takes; -1: not known, or no such op. */
int pm_region_for_thread(const pm_graph *g, pm_opid op, int64_t thread);
/* May the thread take region r of the op? True where nothing is known. */
bool pm_may_take(const pm_graph *g, pm_opid op, uint32_t r, int64_t thread);

#endif
