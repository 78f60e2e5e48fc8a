/* Long lines of generated text go on in the next ones: after a semicolon, else after a comma, else
 * before an operator. Lines of a macro end with a backslash; a string becomes several, which C
 * joins; comments go on in comments. */
#include "cuda.h"

enum { COLUMNS = 100, INDENT = 4 };
enum { OPERATOR, COMMA, SEMICOLON, CUTS }; /* worst first */
typedef struct cut {
  size_t at;
  bool in_string, in_comment;
} cut;

static int cut_kind(const char *line, size_t k, bool in_string) {
  if (line[k] == ';') return SEMICOLON;
  if (line[k] == ',') return COMMA;
  return !in_string && line[k] == ' ' && strchr("+|&?:", line[k + 1]) ? OPERATOR : CUTS;
}

static void put_wrapped(pm_text *out, const char *line, size_t size) {
  const bool macro = *line == '#' || line[size - 1] == '\\';
  const size_t lead = strspn(line, " ");
  const bool same = line[lead] == '/' || line[lead] == ':' || (lead && line[lead] == '"');
  const size_t inner = same ? lead : lead + INDENT;
  bool in_string = false, in_comment = false;
  cut cuts[CUTS] = {0};
  size_t begin = 0, width = 0; /* of what has been printed, of the line so far */
  for (size_t k = 0; k < size; k++, width++) {
    if (in_string && line[k] == '\\' && k + 1 < size) {
      k++;
      width++;
      continue;
    }
    if (line[k] == '"' && !in_comment) in_string = !in_string;
    in_comment = in_comment || (!in_string && line[k] == '/' && line[k + 1] == '/');
    int best = SEMICOLON;
    while (best > 0 && cuts[best].at <= begin) best--;
    const cut c = cuts[best];
    const size_t end = (size_t)c.in_string + 2 * macro; /* a quote, a backslash */
    if (width + end >= COLUMNS && c.at > begin) {
      const char *mark = c.in_string ? "\"" : c.in_comment ? "// " : "";
      const size_t blanks = c.in_string ? 0 : strspn(line + c.at, " ");
      pm_putn(out, line + begin, c.at - begin);
      pm_putf(out, "%s%s\n%*s%s", c.in_string ? mark : "", macro ? " \\" : "", (int)inner, "",
              mark);
      begin = c.at + blanks;
      width = inner + strlen(mark) + k - begin;
    }
    const int kind = k > lead && k + 1 < size ? cut_kind(line, k, in_string) : CUTS;
    if (kind < CUTS) cuts[kind] = (cut){kind == OPERATOR ? k : k + 1, in_string, in_comment};
  }
  pm_putn(out, line + begin, size - begin);
}

void pm_put_lines(pm_text *out, const char *text) {
  while (*text) {
    const size_t size = strcspn(text, "\n");
    if (size > COLUMNS) put_wrapped(out, text, size);
    else pm_putn(out, text, size);
    text += size;
    if (*text) pm_putn(out, text++, 1);
  }
}

void pm_put_program(pm_text *out, const char *program) {
  const char *entry = program, *next = program;
  while ((next = strstr(next, "extern \"C\" __global__"))) entry = next++;
  pm_putn(out, program, (size_t)(entry - program));
  pm_put_lines(out, entry);
}
