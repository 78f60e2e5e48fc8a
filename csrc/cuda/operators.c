/* Parentheses of printed expressions: the fewest with which C++ and its reader group operators as
 * the graph does. Spaces stand around each operator of two operands, and nowhere else outside of
 * brackets. */
#include "gen.h"

/* How tightly an expression holds together, by its operators that stand in no brackets. Others than
 * comparisons and arithmetic keep their parentheses. */
enum { LOOSE, COMPARISON, SUM, PRODUCT, ATOM };

/* sign: an operator, of n characters */
static int strength(const char *sign, size_t n) {
  if (n == 2 && sign[1] == '=') return COMPARISON;
  if (n != 1) return LOOSE;
  if (*sign == '*' || *sign == '/' || *sign == '%') return PRODUCT;
  if (*sign == '+' || *sign == '-') return SUM;
  return *sign == '<' || *sign == '>' ? COMPARISON : LOOSE;
}

static int strength_of(const char *s, size_t n) {
  int depth = 0, least = *s == '!' ? LOOSE : ATOM;
  for (size_t k = 0; k < n; k++) {
    depth += (strchr("([{", s[k]) != NULL) - (strchr(")]}", s[k]) != NULL);
    if (depth || s[k] != ' ') continue;
    const size_t sign = k + 1;
    while (k + 1 < n && s[k + 1] != ' ') k++;
    least = pm_min(least, strength(s + sign, k + 1 - sign));
    k++;
  }
  return least;
}

/* Do the first and the last character belong together, as parentheses around all of it? */
static bool is_wrapped(const char *x) {
  int depth = 0;
  if (*x != '(') return false;
  for (; *x; x++) {
    depth += (*x == '(') - (*x == ')');
    if (!depth) return !x[1];
  }
  return false;
}

const char *pm_atom(pm_gen *e, const char *x) {
  return strength_of(x, strlen(x)) < ATOM ? pm_str(e, "(%s)", x) : x;
}

const char *pm_unwrapped(pm_gen *e, const char *x) {
  return is_wrapped(x) ? pm_str(e, "%.*s", (int)strlen(x) - 2, x + 1) : x;
}

const char *pm_infix_operand(pm_gen *e, const char *x, const char *sign, bool right) {
  if (!is_wrapped(x)) return x;
  const int own = strength_of(x + 1, strlen(x) - 2), outer = strength(sign, strlen(sign));
  const bool first_of_equals = own == outer && !right && outer >= SUM; /* a - b + c */
  return outer > LOOSE && (own > outer || first_of_equals) ? pm_unwrapped(e, x) : x;
}
