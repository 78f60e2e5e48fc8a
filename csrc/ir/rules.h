/* Private interface between builder, type rules and verifier. */
#ifndef PM_RULES_H
#define PM_RULES_H

#include "ir.h"

typedef enum pm_attr_form {
  PM_FORM_INT,
  PM_FORM_BITS,
  PM_FORM_LIST,
  PM_FORM_STR,
  PM_FORM_LAYOUT,
#define V(name, id, text)
#define PM_ENUM(name, values) PM_FORM_ENUM_##name,
#include "enums.def"
#undef PM_ENUM
#undef V
} pm_attr_form;
extern const uint8_t pm_attr_forms[PM_ATTR_COUNT];

/* An op about to be made (builder) or made already (verifier): everything a type rule may look at.
 */
typedef struct pm_typing {
  const pm_graph *g;
  pm_opcode code;
  const pm_val *in; /* in range, types well-formed */
  uint32_t n_in;
  const int64_t *attr;  /* info.n_attrs words */
  const pm_type *given; /* NULL: none */
  pm_err *err;
} pm_typing;

/* Operand kinds, attributes, then the op's rule. `out` is set where the op has one result. */
pm_code pm_type_op(const pm_typing *t, pm_type *out);
/* Is this a type a value may have? `what` names it in the message. */
pm_code pm_type_check(const pm_graph *g, const pm_type *t, const char *what, pm_err *err);

/* Regions. How many arguments each region of a control op has, and their types. */
uint32_t pm_region_args(const pm_graph *g, pm_opid op);
pm_type pm_region_arg_type(const pm_graph *g, pm_opid op, uint32_t arg);
/* All regions are terminated: check their yields against carries and each other. */
pm_code pm_type_yields(const pm_graph *g, pm_opid op, pm_err *err);
/* Results of a control op whose yields were checked. */
uint32_t pm_control_results(const pm_graph *g, pm_opid op);
pm_type pm_control_result_type(const pm_graph *g, pm_opid op, uint32_t k);

#endif
