/* Clocks that share what they know against plain vectors, by random steps. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#include "machine.h"

extern "C" int host_print(const char *format, ...) {
  va_list ap;
  va_start(ap, format);
  const int n = vprintf(format, ap);
  va_end(ap);
  return n;
}

enum : u32 { AGENTS = 12, CLOCKS = 9, OWNED = 6, BEGIN = 3 };

struct Both {
  Times clock;
  std::vector<u32> plain;
  u32 own;
};

static u32 below(u32 n) { return (u32)rand() % n; }

static void raise_to(Both &x, u32 who, u32 value) {
  x.clock.raise_to(who, value, below(2));
  x.plain[who] = std::max(x.plain[who], value);
}

static void raise(std::vector<u32> &to, const std::vector<u32> &from) {
  for (u32 k = 0; k < AGENTS; k++) to[k] = std::max(to[k], from[k]);
}

/* Some of those with an entry of their own. */
static void meet(std::vector<Both> &all) {
  std::vector<Both *> met;
  for (u32 k = 0; k < OWNED; k++)
    if (below(2)) met.push_back(&all[k]);
  if (met.empty()) return;
  Both c = *met[0];
  c.clock.settle();
  for (Both *x : met) {
    c.clock.raise(x->clock);
    raise(c.plain, x->plain);
  }
  for (Both *x : met) {
    x->clock.adopt(c.clock);
    x->plain = c.plain;
  }
}

static void step(std::vector<Both> &all) {
  Both &a = all[below(CLOCKS)], &b = all[below(CLOCKS)];
  switch (below(7)) {
    case 0: return raise_to(a, below(AGENTS), below(60));
    case 1:
      if (a.own != NOBODY) raise_to(a, a.own, a.plain[a.own] + 1);
      return;
    case 2: return meet(all);
    case 3:
      if (&a == &b || below(3)) return;
      a.clock.lower(b.clock);
      for (u32 k = 0; k < AGENTS; k++) a.plain[k] = std::min(a.plain[k], b.plain[k]);
      return;
    case 4: a = b; return;
    default:
      if (&a == &b) return;
      a.clock.raise(b.clock);
      raise(a.plain, b.plain);
  }
}

int main() {
  for (u32 round = 0; round < 1000; round++) {
    std::vector<Both> all(CLOCKS);
    for (u32 k = 0; k < CLOCKS; k++) {
      all[k].own = k < OWNED ? k : (u32)NOBODY;
      all[k].plain.assign(AGENTS, BEGIN);
      all[k].clock.reset(AGENTS, BEGIN, all[k].own);
    }
    for (u32 n = 0; n < 300; n++) {
      step(all);
      for (u32 k = 0; k < CLOCKS; k++)
        for (u32 who = 0; who < AGENTS; who++)
          if (all[k].clock[who] != all[k].plain[who]) {
            printf("round %u, step %u: entry %u of clock %u is %u, not %u\n", round, n, who, k,
                   all[k].clock[who], all[k].plain[who]);
            return 1;
          }
    }
  }
  return 0;
}
