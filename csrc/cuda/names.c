/* Names of the printed program.
 *
 * While the program is printed, each variable has a unique name, a stem and a number: "slot_21".
 * Values have the numbers of the graph's text form; variables of the emitters have the numbers that
 * follow. When the text is complete, a name loses its number if nothing else in its scope has that
 * stem: no other numbered name, no word of the text (a local variable of an emitter, a word of
 * inline_cuda source), no keyword. A value may have a name that occurs only in the device
 * functions. A scope is what C++ makes of the braces of the text; what is named in PTX has all of
 * it.
 *
 * A word of the program may also be a name with a suffix: accumulator acc_39 has the registers
 * acc_39_0 ... and the function acc_39_zero. Comments, #line directives and strings are left
 * unchanged, except strings of functions that are printed for this program: those are PTX and name
 * its registers. */
#include "gen.h"

typedef struct word {
  const char *at;
  uint32_t n, hash;
  bool issued, used;
  bool local;    /* an issued one: that of a value; another: only the catalogue has it */
  bool reserved; /* a keyword, or a macro */
  bool longer;   /* it also occurs with a suffix */
  uint32_t stem; /* characters, of an issued one */
  /* of an issued one: where it is declared and mentioned last, and where its scope ends; NULL: it
   * has all of the text */
  const char *begin, *last, *end;
  uint32_t next; /* another one in the same scope, later of the same stem, plus 1 */
} word;

typedef struct occurrence {
  const char *at;
  uint32_t word;
} occurrence;
typedef PM_VEC(occurrence) occurrences;

/* Open addressing; entries are compared in full. */
typedef struct words {
  PM_VEC(word) all;
  uint32_t *slot, mask; /* number of a word plus 1 */
  pm_arena *arena;
} words;

static uint32_t add_to_hash(uint32_t hash, char c) { return (hash ^ (uint8_t)c) * 0x9e3779b1u; }

static uint32_t hash_of(const char *s, uint32_t n) {
  uint32_t hash = 0;
  for (uint32_t k = 0; k < n; k++) hash = add_to_hash(hash, s[k]);
  return hash;
}

static uint32_t *slot_of(const words *t, const char *s, uint32_t n, uint32_t hash) {
  uint32_t k = (hash ^ hash >> 15) & t->mask;
  for (; t->slot[k]; k = (k + 1) & t->mask) {
    const word *w = &t->all.at[t->slot[k] - 1];
    if (w->hash == hash && w->n == n && !memcmp(w->at, s, n)) break;
  }
  return &t->slot[k];
}

static word *find_word(const words *t, const char *s, uint32_t n) {
  const uint32_t number = *slot_of(t, s, n, hash_of(s, n));
  return number ? &t->all.at[number - 1] : NULL;
}

static void grow(words *t) {
  t->mask = t->slot ? 2 * t->mask + 1 : 2047;
  t->slot = PM_NEW(t->arena, uint32_t, t->mask + 1);
  for (uint32_t k = 0; k < t->all.n; k++) {
    const word *w = &t->all.at[k];
    *slot_of(t, w->at, w->n, w->hash) = k + 1;
  }
}

/* Valid until another word is added. */
static word *add_hashed(words *t, const char *s, uint32_t n, uint32_t hash) {
  if (!t->slot || t->all.n * 2 > t->mask) grow(t);
  uint32_t *slot = slot_of(t, s, n, hash);
  if (!*slot) {
    pm_vec_push(t->arena, &t->all, ((word){.at = s, .n = n, .hash = hash}));
    *slot = t->all.n;
  }
  return &t->all.at[*slot - 1];
}

static word *add_word(words *t, const char *s, uint32_t n) {
  return add_hashed(t, s, n, hash_of(s, n));
}

/* ---- words of a text ---------------------------------------------------------------------- */

enum { LETTER = 1, DIGIT = 2, SKIPPED = 4 }; /* SKIPPED: what skip() may go past begins there */
static const uint8_t kinds[256] = {
    ['a' ... 'z'] = LETTER, ['A' ... 'Z'] = LETTER,
    ['_'] = LETTER,         ['0' ... '9'] = DIGIT | SKIPPED,
    ['/'] = SKIPPED,        ['#'] = SKIPPED,
    ['"'] = SKIPPED,        ['\''] = SKIPPED,
    ['\\'] = SKIPPED,
};
static bool is_letter(char c) { return kinds[(uint8_t)c] & LETTER; }
static bool is_part(char c) { return kinds[(uint8_t)c] & (LETTER | DIGIT); }

/* The end of what begins at s and has no names: a comment, a directive, a string, a number; s
 * itself if there is none. A string of PTX has names. */
static const char *skip(const char *s, const char *end, bool ptx) {
  if (*s == '/' && s + 1 < end && s[1] == '/') {
    while (s < end && *s != '\n') s++;
  } else if (*s == '/' && s + 1 < end && s[1] == '*') {
    while (s < end && !(s[0] == '*' && s[1] == '/')) s++;
  } else if (*s == '#' && !strncmp(s, "#line", 5)) {
    while (s < end && *s != '\n') s++;
  } else if (*s == '"' && !ptx) {
    for (s++; s < end && *s != '"'; s++) s += *s == '\\';
    s++;
  } else if (*s == '\'' && s + 2 < end && (s[1] == '\\' || s[2] == '\'')) {
    s += s[1] == '\\' ? 4 : 3;
  } else if (*s == '\\' && ptx) {
    s += 2; /* \n */
  } else if (!is_letter(*s)) {
    while (s < end && is_part(*s)) s++;
  }
  return s < end ? s : end;
}

/* The issued name that the n characters begin with before a '_'; NULL: none. */
static word *issued_before(words *t, const char *s, uint32_t n) {
  for (uint32_t k = n - 1; k > 0; k--) {
    if (s[k] != '_') continue;
    word *w = find_word(t, s, k);
    if (w && w->issued) return w;
  }
  return NULL;
}

/* Note the words of a text; `issued` gets the places of issued names. */
static void note_words(words *t, const char *s, size_t size, bool ptx, bool catalogue,
                       occurrences *issued) {
  for (const char *first = s, *end = s + size; s < end;) {
    const char *next = kinds[(uint8_t)*s] & SKIPPED ? skip(s, end, ptx) : s;
    if (next > s || !is_letter(*s)) {
      s = next > s ? next : s + 1;
      continue;
    }
    const char *begin = s;
    uint32_t hash = 0;
    for (; s < end && is_part(*s); s++) hash = add_to_hash(hash, *s);
    const uint32_t n = (uint32_t)(s - begin), number = *slot_of(t, begin, n, hash);
    const bool member = !ptx && begin > first && begin[-1] == '.';
    word *w = number ? &t->all.at[number - 1] : NULL, *name = w && w->issued ? w : NULL;
    if (!w && !catalogue) name = issued_before(t, begin, n);
    if (name) pm_vec_push(t->arena, issued, ((occurrence){begin, (uint32_t)(name - t->all.at)}));
    if (member) continue;
    if (!name) {
      name = w ? w : add_hashed(t, begin, n, hash);
      name->local |= catalogue && !name->used;
    }
    if (name->issued ? ptx : !catalogue) name->local = false;
    name->used = true;
    name->longer |= name->n < n;
  }
}

/* ---- scopes ---------------------------------------------------------------------------------- */

typedef struct scope {
  char closing;
  uint32_t first; /* of the words that are declared in it, plus 1 */
} scope;
typedef PM_VEC(scope) scopes;

static void close_scope(words *t, const scope *s, const char *end) {
  for (uint32_t k = s->first; k; k = t->all.at[k - 1].next) t->all.at[k - 1].end = end;
}

static void move_words(words *t, const scope *from, scope *to) {
  for (uint32_t k = from->first, next; k; k = next) {
    next = t->all.at[k - 1].next;
    t->all.at[k - 1].next = to->first;
    to->first = k;
  }
}

/* A variable that is declared in parentheses, of a function or of a `for`, has the block that
 * follows them. False: braces do not match. */
static bool find_scopes(words *t, const char *s, size_t size, const occurrences *issued) {
  scopes open = {0};
  scope block = {0}; /* the words of parentheses that closed right before */
  uint32_t k = 0;
  pm_vec_push(t->arena, &open, ((scope){0}));
  for (const char *end = s + size; s < end;) {
    scope *inner = &open.at[open.n - 1];
    const char *next = kinds[(uint8_t)*s] & SKIPPED ? skip(s, end, false) : s;
    if (next > s) {
      s = next;
      continue;
    }
    if (*s == '(' || *s == '{') {
      const scope opened = {*s == '(' ? ')' : '}', *s == '{' ? block.first : 0};
      if (opened.first) block.first = 0;
      pm_vec_push(t->arena, &open, opened);
    } else if (*s == ')' || *s == '}') {
      if (*s != inner->closing) return false;
      const scope closed = *inner;
      open.n--;
      if (*s == '}') close_scope(t, &closed, s);
      else move_words(t, &closed, &block);
    } else if (*s != ' ' && *s != '\n' && block.first) { /* no block follows */
      move_words(t, &block, inner);
      block.first = 0;
    }
    for (; k < issued->n && issued->at[k].at == s; k++) {
      word *w = &t->all.at[issued->at[k].word];
      w->last = s;
      if (w->begin) continue;
      w->begin = s;
      w->next = inner->first;
      inner->first = issued->at[k].word + 1;
    }
    if (is_letter(*s)) {
      while (s < end && is_part(*s)) s++;
    } else {
      s++;
    }
  }
  close_scope(t, &open.at[0], s);
  return open.n == 1;
}

static void note_scopes(words *t, const pm_text *own, const occurrences *in_own,
                        const occurrences *in_ptx) {
  const bool found = find_scopes(t, own->at, own->n, in_own);
  for (uint32_t k = 0; k < t->all.n; k++) {
    word *w = &t->all.at[k];
    if (!found || w->last > w->end) w->end = NULL;
    w->next = 0;
  }
  for (uint32_t k = 0; k < in_ptx->n; k++) t->all.at[in_ptx->at[k].word].end = NULL;
}

/* Could one of them be taken for the other where both have the same name? */
static bool meet(const word *a, const word *b) {
  return !a->end || !b->end || (a->begin <= b->end && b->begin <= a->end);
}

/* ---- what may lose its number --------------------------------------------------------------- */

/* each is followed by a space */
static const char keywords[] =
    "alignas alignof and and_eq asm auto bitand bitor bool break case catch char char16_t "
    "char32_t char8_t class co_await co_return co_yield compl concept const const_cast "
    "consteval constexpr constinit continue decltype default delete do double dynamic_cast "
    "else enum explicit export extern false float for friend goto if inline int long mutable "
    "namespace new noexcept not not_eq nullptr operator or or_eq private protected public "
    "register reinterpret_cast requires return short signed sizeof static static_assert "
    "static_cast struct switch template this thread_local throw true try typedef typeid "
    "typename typeof union unsigned using virtual void volatile wchar_t while xor xor_eq "
    "assert errno linux main unix printf memcpy memset stdin stdout stderr NULL EOF "
    "threadIdx blockIdx blockDim gridDim warpSize ";

static bool same_stem(const word *a, const word *b) {
  return a->issued && b->issued && a->stem == b->stem && !memcmp(a->at, b->at, a->stem);
}

/* Does a word begin with the stem and '_', other than its own and those of the same stem? */
static bool begins_other(const words *t, const word *w) {
  for (uint32_t k = 0; k < t->all.n; k++) {
    const word *x = &t->all.at[k];
    if (x->used && !same_stem(x, w) && x->n > w->stem && x->at[w->stem] == '_' &&
        !memcmp(x->at, w->at, w->stem)) {
      return true;
    }
  }
  return false;
}

/* Reserved, of a value without a name, or perhaps a macro of the compiler. */
static bool keeps_number(const word *w) {
  const bool unnamed = w->stem == 1 && *w->at == 'v';
  bool small = w->stem == 1;
  for (uint32_t k = 0; k < w->stem; k++) small |= w->at[k] >= 'a' && w->at[k] <= 'z';
  return *w->at == '_' || unnamed || !small;
}

/* `next` of a word becomes the word before it that has the same stem. */
static void chain_stems(words *t) {
  words stems = {.arena = t->arena}; /* next: the last word so far, plus 1 */
  for (uint32_t k = 0; k < t->all.n; k++) {
    word *w = &t->all.at[k];
    if (!w->issued || !w->used) continue;
    word *stem = add_word(&stems, w->at, w->stem);
    w->next = stem->next;
    stem->next = k + 1;
  }
}

/* After this an issued name that keeps its number is its own stem. */
static void drop_numbers(words *t) {
  bool *keeps = PM_NEW(t->arena, bool, t->all.n);
  chain_stems(t);
  for (uint32_t k = 0; k < t->all.n; k++) {
    const word *w = &t->all.at[k];
    if (!w->issued || !w->used) continue;
    const word *same = find_word(t, w->at, w->stem);
    const bool of_catalogue = same && w->local && same->local && same->used;
    const bool taken = same && (same->issued || same->reserved || !of_catalogue);
    keeps[k] |= keeps_number(w) || taken || (w->longer && begins_other(t, w));
    for (uint32_t i = w->next; i && !keeps_number(w); i = t->all.at[i - 1].next) {
      if (!meet(w, &t->all.at[i - 1])) continue;
      keeps[k] = keeps[i - 1] = true;
    }
  }
  for (uint32_t k = 0; k < t->all.n; k++) {
    if (keeps[k]) t->all.at[k].stem = t->all.at[k].n;
  }
}

static void rename_words(const words *t, pm_text *text, const occurrences *issued) {
  const char *copied = text->at;
  pm_text out;
  pm_text_init(&out, t->arena);
  for (uint32_t k = 0; k < issued->n; k++) {
    const word *w = &t->all.at[issued->at[k].word];
    if (w->stem == w->n) continue;
    pm_putn(&out, copied, (size_t)(issued->at[k].at - copied) + w->stem);
    copied = issued->at[k].at + w->n;
  }
  pm_putn(&out, copied, (size_t)(text->at + text->n - copied));
  *text = out;
}

void pm_print_names(pm_gen *e, const pm_text *catalogue, pm_text *ptx, pm_text *own) {
  words t = {.arena = e->arena};
  occurrences in_catalogue = {0}, in_ptx = {0}, in_own = {0};
  for (const char *s = keywords; *s; s += strcspn(s, " ") + 1)
    add_word(&t, s, (uint32_t)strcspn(s, " "))->reserved = true;
  for (uint32_t k = 0; k < e->issued.n; k++) {
    word *w = add_word(&t, e->issued.at[k].text, (uint32_t)strlen(e->issued.at[k].text));
    w->issued = true;
    w->stem = e->issued.at[k].stem;
    w->local = e->issued.at[k].local;
  }
  note_words(&t, catalogue->at, catalogue->n, false, true, &in_catalogue);
  note_words(&t, ptx->at, ptx->n, true, false, &in_ptx);
  note_words(&t, own->at, own->n, false, false, &in_own);
  note_scopes(&t, own, &in_own, &in_ptx);
  drop_numbers(&t);
  rename_words(&t, ptx, &in_ptx);
  rename_words(&t, own, &in_own);
}
