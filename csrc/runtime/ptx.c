/* Products in PTX: which instruction each becomes, by its name, and which of them a compiler must
 * keep.
 *
 * A compiler may drop a product whose result is unused, and one of two identical products. Each
 * function of the text is parsed into statements (name, registers written, registers read) and
 * basic blocks. Strong liveness is computed from the last statement to the first until nothing
 * changes: a pure computation is needed if a register that it writes is needed; everything else is
 * always needed, and so is what needed statements read. A wgmma whose predicate is certainly false
 * does not read its accumulator. Needed synchronous products that read the same values count once.
 * Values are numbered by hashes of the only statement that writes the register, down to anything
 * that is not arithmetic.
 *
 * This runs only if the machine code has fewer products than the PTX (products.c). If it cannot
 * decide, a product is needed. */
#define _GNU_SOURCE /* memmem */
#include <ctype.h>
#include <stdlib.h>

#include "products.h"

#define NO_REG UINT32_MAX
enum { DEEPEST = 64 }; /* computations followed for one value */

/* ---- names of products --------------------------------------------------------------------- */

/* Is `part`, which begins with a dot, one of the name's parts? The empty one is. */
static bool has_part(const char *name, size_t size, const char *part) {
  const size_t n = strlen(part);
  if (!n) return true;
  for (const char *at = name; (at = memmem(at, size - (size_t)(at - name), part, n)); at += n) {
    if (at + n == name + size || at[n] == '.') return true;
  }
  return false;
}

/* By parts of the name: of wgmma, of mma where it takes 8-bit floats. NONE: Hopper has no such
 * instruction, and ptxas calls a function of its own, which has few. The first part that fits. */
static const struct {
  const char *part;
  uint8_t of_wgmma, of_mma;
} kinds[] = {
    {".e4m3", PM_PRODUCT_QGMMA, PM_PRODUCT_QMMA}, {".e5m2", PM_PRODUCT_QGMMA, PM_PRODUCT_QMMA},
    {".s8", PM_PRODUCT_IGMMA, PM_PRODUCT_IMMA},   {".u8", PM_PRODUCT_IGMMA, PM_PRODUCT_IMMA},
    {".s4", PM_PRODUCT_NONE, PM_PRODUCT_NONE},    {".u4", PM_PRODUCT_NONE, PM_PRODUCT_NONE},
    {".xor", PM_PRODUCT_NONE, PM_PRODUCT_NONE},   {".b1", PM_PRODUCT_BGMMA, PM_PRODUCT_BMMA},
    {".f64", PM_PRODUCT_NONE, PM_PRODUCT_DMMA},   {".m8n8k4", PM_PRODUCT_NONE, PM_PRODUCT_NONE},
    {"", PM_PRODUCT_HGMMA, PM_PRODUCT_HMMA}};

bool pm_has_qmma(const char *ptx) {
  const char *at = strstr(ptx, ".target sm_");
  const long capability = at ? strtol(at + 11, NULL, 10) : 0;
  return capability == 89 || capability >= 120;
}

pm_product pm_product_of(const char *name, bool qmma) {
  const bool async = !strncmp(name, "wgmma.mma_async.", 16);
  const size_t n = strcspn(name, " \t\n{;");
  if (!async && strncmp(name, "mma.", 4) && strncmp(name, "wmma.mma.", 9)) return PM_PRODUCT_NONE;
  size_t k = 0;
  while (!has_part(name, n, kinds[k].part)) k++;
  if (async) return kinds[k].of_wgmma;
  return kinds[k].of_mma == PM_PRODUCT_QMMA && !qmma ? PM_PRODUCT_HMMA : kinds[k].of_mma;
}

/* ---- statements ---------------------------------------------------------------------------- */

typedef struct statement {
  const char *name, *end; /* of its text, from the opcode on */
  uint32_t first;         /* in `used`: registers written, then those read */
  uint32_t n_written, n_read, guard;
  uint32_t scope;
  pm_product product;
  bool removable;
} statement;

typedef struct register_set { /* .reg name<count> or .reg name */
  const char *name;
  uint32_t size, first, count;
  bool numbered;
} register_set;

typedef struct label {
  const char *name;
  uint32_t size, scope, at; /* the statement after it */
} label;

typedef struct reg {
  uint32_t n_writers, writer; /* the last one */
  uint32_t which;             /* of the registers that it writes */
  uint64_t value;             /* its number, 0: not known yet */
} reg;

typedef struct block {
  uint32_t first, end; /* statements */
  uint32_t next[2];    /* blocks; NO_REG: none */
  bool anywhere;       /* it may go to any label */
  uint64_t *live;      /* registers at its end */
} block;

typedef struct use { /* of a register: the word that names it */
  uint32_t reg;
  const char *at, *end;
} use;

typedef struct function {
  pm_arena *arena;
  PM_VEC(statement) statements;
  PM_VEC(use) used;
  PM_VEC(register_set) register_sets; /* of the scopes that are open */
  PM_VEC(uint32_t) opened;            /* register_sets when a scope began */
  PM_VEC(uint32_t) inside;            /* numbers of the scopes that are open */
  PM_VEC(uint32_t) parent;            /* of scopes */
  PM_VEC(label) labels;
  PM_VEC(reg) regs;
  PM_VEC(block) blocks;
  uint32_t *block_of; /* statements */
  bool qmma;          /* pm_has_qmma */
  uint64_t unique;
} function;

/* ---- text --------------------------------------------------------------------------------- */

static bool is_word(char c) {
  return isalnum((unsigned char)c) || c == '_' || c == '$' || c == '%';
}

/* A copy whose comments are blanks. */
static char *without_comments(pm_arena *arena, const char *ptx) {
  char *text = pm_strdup(arena, ptx, strlen(ptx));
  for (char *s = text; *s;) {
    if (s[0] == '/' && s[1] == '/') {
      while (*s && *s != '\n') *s++ = ' ';
    } else if (s[0] == '/' && s[1] == '*') {
      char *end = strstr(s + 2, "*/");
      end = end ? end + 2 : s + strlen(s);
      memset(s, ' ', (size_t)(end - s));
      s = end;
    } else if (*s == '"') {
      for (s++; *s && *s != '"'; s++) *s = '_'; /* no braces of strings */
      if (*s) s++;
    } else {
      s++;
    }
  }
  return text;
}

static bool begins(const char *s, const char *word) { return !strncmp(s, word, strlen(word)); }

static const char *skip_blanks(const char *s) {
  while (isspace((unsigned char)*s)) s++;
  return s;
}

/* The end of the operand that begins at s: a comma outside of brackets, or the statement's end. */
static const char *operand_end(const char *s, const char *end) {
  for (int depth = 0; s < end; s++) {
    if (strchr("{[(", *s)) depth++;
    if (strchr("}])", *s)) depth--;
    if (*s == ',' && !depth) break;
  }
  return s;
}

/* Operand k, from 0 on; NULL: there are fewer. */
static const char *operand(const statement *s, int k, const char **end) {
  const char *at = s->name;
  while (at < s->end && !isspace((unsigned char)*at)) at++;
  for (;; k--, at = *end + 1) {
    *end = operand_end(at, s->end);
    if (!k) return skip_blanks(at) < *end ? skip_blanks(at) : NULL;
    if (*end >= s->end) return NULL;
  }
}

/* ---- registers ---------------------------------------------------------------------------- */

static uint32_t find_reg(const function *f, const char *name, uint32_t size) {
  for (uint32_t k = f->register_sets.n; k--;) {
    const register_set *m = &f->register_sets.at[k];
    if (size < m->size || memcmp(name, m->name, m->size)) continue;
    if (!m->numbered && size == m->size) return m->first;
    if (!m->numbered || size == m->size) continue;
    char *end;
    const unsigned long n = strtoul(name + m->size, &end, 10);
    if (isdigit((unsigned char)name[m->size]) && end == name + size && n < m->count)
      return m->first + (uint32_t)n;
  }
  return NO_REG;
}

/* The next word of the text that is a register; false: there is none. */
static bool next_use(const function *f, const char **at, const char *end, use *out) {
  for (const char *s = *at; s < end;) {
    if (!is_word(*s)) {
      s++;
      continue;
    }
    const char *word = s;
    while (s < end && is_word(*s)) s++;
    if (isdigit((unsigned char)*word)) continue;
    *out = (use){find_reg(f, word, (uint32_t)(s - word)), word, s};
    *at = s;
    if (out->reg != NO_REG) return true;
  }
  *at = end;
  return false;
}

/* .reg .type name<n>, name, ...; */
static void declare(function *f, const char *s, const char *end) {
  for (s += 4; s < end;) {
    if (*s == '.') {
      while (s < end && !isspace((unsigned char)*s)) s++;
    } else if (!is_word(*s)) {
      s++;
    } else {
      register_set m = {.name = s, .first = f->regs.n, .count = 1};
      while (s < end && is_word(*s)) s++;
      m.size = (uint32_t)(s - m.name);
      if (*s == '<') {
        m.numbered = true;
        m.count = (uint32_t)strtoul(s + 1, NULL, 10);
        while (s < end && *s != ',') s++;
      }
      pm_vec_push(f->arena, &f->register_sets, m);
      pm_vec_reserve(f->arena, &f->regs, f->regs.n + m.count);
      memset(&f->regs.at[f->regs.n], 0, m.count * sizeof *f->regs.at);
      f->regs.n += m.count;
    }
  }
}

/* ---- statements --------------------------------------------------------------------------- */

/* What writes its first operand and does nothing else. */
static const char *const pure[] = {
    "abs",      "activemask", "add",  "addc",  "and",      "bfe",   "bfi",          "bfind",
    "bmsk",     "brev",       "clz",  "cnot",  "copysign", "cos",   "createpolicy", "cvt",
    "cvta",     "div",        "dp2a", "dp4a",  "elect",    "ex2",   "fma",          "fns",
    "isspacep", "ldmatrix",   "lg2",  "lop3",  "mad",      "mad24", "mapa",         "match",
    "max",      "min",        "mma",  "mov",   "mul",      "mul24", "neg",          "not",
    "or",       "popc",       "prmt", "rcp",   "rem",      "rsqrt", "sad",          "selp",
    "set",      "setp",       "shf",  "shfl",  "shl",      "shr",   "sin",          "slct",
    "sqrt",     "sub",        "subc", "szext", "tanh",     "testp", "vote",         "wmma",
    "xor"};

static bool is_pure(const char *name) {
  const size_t n = strcspn(name, ". \t\n");
  for (size_t k = 0; k < PM_COUNT(pure); k++) {
    if (strlen(pure[k]) == n && !memcmp(pure[k], name, n)) return true;
  }
  const size_t whole = strcspn(name, " \t\n");
  if (n != 2 || memcmp(name, "ld", 2)) return begins(name, "wgmma.mma_async");
  const char *kept[] = {".volatile", ".acquire", ".relaxed", ".mmio"};
  for (size_t k = 0; k < PM_COUNT(kept); k++) {
    const char *at = strstr(name, kept[k]);
    if (at && at < name + whole) return false;
  }
  return true;
}

static void add_statement(function *f, const char *s, const char *end) {
  statement x = {.end = end, .guard = NO_REG, .scope = f->inside.at[f->inside.n - 1]};
  use u;
  if (*s == '@') {
    const char *blank = s + strcspn(s, " \t\n");
    if (next_use(f, &s, blank, &u)) x.guard = u.reg;
    s = skip_blanks(blank);
  }
  x.name = s;
  x.product = pm_product_of(s, f->qmma);
  x.removable = is_pure(s);
  x.first = f->used.n;
  const char *stop, *at = operand(&x, 0, &stop);
  while (at && *at != '[' && next_use(f, &at, stop, &u)) { /* written, if anything is */
    reg *r = &f->regs.at[u.reg];
    r->n_writers++;
    r->writer = f->statements.n;
    r->which = x.n_written;
    if (!x.removable) continue;
    pm_vec_push(f->arena, &f->used, u);
    x.n_written++;
  }
  for (at = x.removable ? stop : s; next_use(f, &at, end, &u); x.n_read++)
    pm_vec_push(f->arena, &f->used, u);
  pm_vec_push(f->arena, &f->statements, x);
}

static void open_scope(function *f) {
  const uint32_t outer = f->inside.n ? f->inside.at[f->inside.n - 1] : NO_REG;
  const uint32_t n = f->register_sets.n, number = f->parent.n;
  pm_vec_push(f->arena, &f->opened, n);
  pm_vec_push(f->arena, &f->inside, number);
  pm_vec_push(f->arena, &f->parent, outer);
}

static bool close_scope(function *f) {
  f->register_sets.n = f->opened.at[--f->opened.n];
  f->inside.n--;
  return f->inside.n != 0;
}

/* The body that begins after a brace; what is after it. */
static const char *read_body(function *f, const char *s) {
  open_scope(f);
  while (*(s = skip_blanks(s))) {
    if (*s == '{' || *s == '}') {
      if (*s++ == '{') open_scope(f);
      else if (!close_scope(f)) break;
      continue;
    }
    if (begins(s, ".loc")) {
      s += strcspn(s, "\n");
      continue;
    }
    const char *word = s;
    while (is_word(*s)) s++;
    if (s > word && *s == ':' && s[1] != ':') {
      label l = {word, (uint32_t)(s++ - word), f->inside.at[f->inside.n - 1], f->statements.n};
      pm_vec_push(f->arena, &f->labels, l);
      continue;
    }
    const char *end = word + strcspn(word, ";");
    if (begins(word, ".reg")) declare(f, word, end);
    else if (*word != '.') add_statement(f, word, end);
    s = *end ? end + 1 : end;
  }
  return s;
}

/* ---- blocks ------------------------------------------------------------------------------- */

/* Goes elsewhere than to the next statement, perhaps. */
static bool ends_block(const statement *s) {
  return begins(s->name, "bra") || begins(s->name, "brx") || begins(s->name, "ret") ||
         begins(s->name, "exit") || begins(s->name, "trap");
}

/* The label of a branch: of the innermost scope that has it. */
static uint32_t target(const function *f, const statement *s) {
  const char *end, *at = operand(s, 0, &end);
  uint32_t size = 0;
  while (at && at + size < end && is_word(at[size])) size++;
  for (uint32_t scope = s->scope; at && scope != NO_REG; scope = f->parent.at[scope]) {
    for (uint32_t k = 0; k < f->labels.n; k++) {
      const label *l = &f->labels.at[k];
      if (l->scope == scope && l->size == size && !memcmp(l->name, at, size)) return l->at;
    }
  }
  return NO_REG;
}

static void find_blocks(function *f) {
  const uint32_t n = f->statements.n;
  bool *begin = PM_NEW(f->arena, bool, n + 1);
  f->block_of = PM_NEW(f->arena, uint32_t, n + 1);
  begin[0] = true;
  for (uint32_t k = 0; k < f->labels.n; k++) begin[f->labels.at[k].at] = true;
  for (uint32_t k = 0; k < n; k++) begin[k + 1] |= ends_block(&f->statements.at[k]);
  for (uint32_t k = 0; k < n; k++) {
    if (begin[k]) {
      block b = {.first = k, .next = {NO_REG, NO_REG}};
      pm_vec_push(f->arena, &f->blocks, b);
    }
    f->blocks.at[f->blocks.n - 1].end = k + 1;
    f->block_of[k] = f->blocks.n - 1;
  }
  for (uint32_t k = 0; k < f->blocks.n; k++) {
    block *b = &f->blocks.at[k];
    const statement *last = &f->statements.at[b->end - 1];
    const bool leaves = ends_block(last), branch = begins(last->name, "bra");
    b->live = PM_NEW(f->arena, uint64_t, f->regs.n / 64 + 1);
    if ((!leaves || last->guard != NO_REG) && b->end < n) b->next[0] = k + 1;
    const uint32_t to = branch ? target(f, last) : NO_REG;
    if (to < n) b->next[1] = f->block_of[to];
    b->anywhere = (branch && to == NO_REG) || begins(last->name, "brx");
  }
}

/* ---- values ------------------------------------------------------------------------------- */

static uint64_t value_of(function *f, uint32_t r, int depth);

/* The number of a part of what the statement reads: of one register its value, else of the text
 * with registers by their values. */
static uint64_t part_value(function *f, const statement *s, const char *at, const char *end,
                           int depth) {
  uint64_t value = 0;
  const use *u = &f->used.at[s->first + s->n_written], *last = u + s->n_read;
  while (end > at && isspace((unsigned char)end[-1])) end--;
  for (; u < last && u->at < end; u++) {
    if (u->at < at) continue;
    const uint64_t one = value_of(f, u->reg, depth + 1);
    if (u->at == at && u->end == end) return one;
    value = pm_hash(at, (size_t)(u->at - at), value) ^ one;
    at = u->end;
  }
  return pm_hash(at, (size_t)(end - at), value);
}

/* Of all that it reads, and its name. */
static uint64_t statement_value(function *f, const statement *s, int depth) {
  const char *end;
  const size_t n = strcspn(s->name, " \t\n");
  operand(s, 0, &end);
  if (begins(s->name, "mov.")) return part_value(f, s, skip_blanks(end + 1), s->end, depth);
  return pm_hash(s->name, n, part_value(f, s, end, s->end, depth));
}

/* Of a register that one statement computes from others alone; else a number of its own. */
static uint64_t value_of(function *f, uint32_t r, int depth) {
  reg *x = &f->regs.at[r];
  if (x->value) return x->value;
  x->value = pm_hash(&r, sizeof r, ++f->unique); /* if it leads to itself, too */
  const statement *s = &f->statements.at[x->writer];
  if (x->n_writers != 1 || !s->removable || s->guard != NO_REG || depth > DEEPEST ||
      begins(s->name, "wgmma"))
    return x->value;
  const uint64_t value = statement_value(f, s, depth);
  x->value = s->n_written == 1 ? value : pm_hash(&x->which, sizeof x->which, value);
  return x->value;
}

/* A wgmma whose predicate is setp.ne of equal numbers. */
static bool overwrites(function *f, const statement *s) {
  const char *end, *p = operand(s, 3, &end), *a, *b;
  const use *u = &f->used.at[s->first + s->n_written], *last = u + s->n_read;
  while (p && u < last && u->at != p) u++;
  if (!p || u == last || f->regs.at[u->reg].n_writers != 1) return false;
  const statement *set = &f->statements.at[f->regs.at[u->reg].writer];
  if (!begins(set->name, "setp.ne") || set->guard != NO_REG) return false;
  const char *a_end, *b_end;
  a = operand(set, 1, &a_end);
  b = operand(set, 2, &b_end);
  return a && b && part_value(f, set, a, a_end, 0) == part_value(f, set, b, b_end, 0);
}

/* ---- what is needed ----------------------------------------------------------------------- */

static bool has(const uint64_t *set, uint32_t r) { return set[r / 64] >> (r % 64) & 1; }

static void put(uint64_t *set, uint32_t r) { set[r / 64] |= 1ull << (r % 64); }

/* From what is live after the statement to what is live before it. false: it is not needed. */
static bool step_back(function *f, const statement *s, uint64_t *live) {
  const use *u = &f->used.at[s->first];
  bool needed = !s->removable || !s->n_written;
  for (uint32_t k = 0; k < s->n_written; k++) needed |= has(live, u[k].reg);
  if (!needed) return false;
  const bool async = begins(s->name, "wgmma.mma_async"), adds = async && !overwrites(f, s);
  for (uint32_t k = 0; k < s->n_written && s->guard == NO_REG; k++)
    live[u[k].reg / 64] &= ~(1ull << (u[k].reg % 64));
  for (uint32_t k = 0; k < s->n_written && adds; k++) put(live, u[k].reg);
  for (uint32_t k = 0; k < s->n_read; k++) put(live, u[s->n_written + k].reg);
  if (s->guard != NO_REG) put(live, s->guard);
  return true;
}

/* What is live at the block's end: more than was known? */
static bool look_ahead(function *f, block *b, uint64_t *const *at_begin, uint32_t words) {
  bool more = false;
  for (uint32_t k = 0; k < f->blocks.n; k++) {
    if (!b->anywhere && k != b->next[0] && k != b->next[1]) continue;
    for (uint32_t w = 0; w < words; w++) {
      more |= (at_begin[k][w] & ~b->live[w]) != 0;
      b->live[w] |= at_begin[k][w];
    }
  }
  return more;
}

static void find_live(function *f) {
  const uint32_t words = f->regs.n / 64 + 1;
  uint64_t **at_begin = PM_NEW(f->arena, uint64_t *, f->blocks.n + 1);
  for (uint32_t k = 0; k < f->blocks.n; k++) at_begin[k] = PM_NEW(f->arena, uint64_t, words);
  for (bool more = true, first = true; more; first = false) {
    more = false;
    for (uint32_t k = f->blocks.n; k--;) {
      block *b = &f->blocks.at[k];
      if (!look_ahead(f, b, at_begin, words) && !first) continue;
      more = true;
      memcpy(at_begin[k], b->live, words * sizeof *b->live);
      for (uint32_t s = b->end; s-- > b->first;) step_back(f, &f->statements.at[s], at_begin[k]);
    }
  }
}

static int compare(const void *a, const void *b) {
  const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
  return x < y ? -1 : x > y;
}

/* Those that are needed; of each kind of mma the values that differ. */
static void count_needed(function *f, uint32_t n[PM_PRODUCT_COUNT]) {
  uint64_t *values = PM_NEW(f->arena, uint64_t, f->statements.n + 1);
  uint32_t found = 0;
  for (uint32_t k = 0; k < f->blocks.n; k++) {
    block *b = &f->blocks.at[k];
    for (uint32_t i = b->end; i-- > b->first;) {
      const statement *s = &f->statements.at[i];
      if (!step_back(f, s, b->live) || s->product == PM_PRODUCT_NONE) continue;
      if (begins(s->name, "wgmma")) n[s->product]++;
      else values[found++] = statement_value(f, s, 0) << 4 | s->product;
    }
  }
  qsort(values, found, sizeof *values, compare);
  for (uint32_t k = 0; k < found; k++) {
    if (!k || values[k] != values[k - 1]) n[values[k] & 15]++;
  }
}

void pm_ptx_products(const char *ptx, uint32_t n[PM_PRODUCT_COUNT]) {
  pm_arena arena;
  pm_arena_init(&arena);
  const char *s = without_comments(&arena, ptx);
  const bool qmma = pm_has_qmma(s);
  memset(n, 0, PM_PRODUCT_COUNT * sizeof *n);
  while (*(s = skip_blanks(s))) {
    const char *end = s + strcspn(s, "{;");
    const char *entry = strstr(s, ".entry"), *func = strstr(s, ".func");
    const bool body = *end == '{' && ((entry && entry < end) || (func && func < end));
    s = *end ? end + 1 : end;
    if (!body) continue; /* the braces of data and of debug sections hold no function */
    function f = {.arena = &arena, .qmma = qmma};
    s = read_body(&f, s);
    if (!f.statements.n) continue;
    find_blocks(&f);
    find_live(&f);
    count_needed(&f, n);
  }
  pm_arena_free(&arena);
}
