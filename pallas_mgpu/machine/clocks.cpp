/* Vector clocks.
 *
 * A clock has an entry for each agent, and there are thousands in a cluster of large blocks. But
 * threads that met at a barrier know the same, but for their own next steps. So a clock is a
 * vector that many clocks share, copied before it changes, and beside it one entry of its own.
 * Joining what is shared is done once: a clock remembers which shared vector it has joined, and a
 * small table remembers the results of the latest joins, for the threads that do the same next. A
 * barrier of n threads takes the time of a few vectors and n entries, not of n vectors. */
#include "machine.h"

#if defined(__x86_64__) && defined(__GLIBC__)
#define FOR_WIDE_VECTORS __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_WIDE_VECTORS
#endif

FOR_WIDE_VECTORS
static void raise(u32 *to, const u32 *a, const u32 *b, size_t n) {
  for (size_t k = 0; k < n; k++) to[k] = a[k] > b[k] ? a[k] : b[k];
}

FOR_WIDE_VECTORS
static void lower(u32 *to, const u32 *a, const u32 *b, size_t n) {
  for (size_t k = 0; k < n; k++) to[k] = a[k] < b[k] ? a[k] : b[k];
}

/* ---- times --------------------------------------------------------------------------------- */

void Times::reset(size_t n, u32 value, u32 who) {
  static Shared zeros, begins; /* all threads of a cluster begin with the same */
  Shared &last = value ? begins : zeros;
  if (!last || last->size() != n || (*last)[0] != value)
    last = std::make_shared<std::vector<u32>>(n, value);
  shared = last;
  joined = nullptr;
  own = who;
  when = value;
}

/* What a shared vector became, of the latest changes. */
struct Change {
  std::shared_ptr<std::vector<u32>> from, with, to; /* with: NULL, entry `who` was raised */
  u32 who, when;
};
static Change changes[64];

static Change &change_of(const void *from, const void *with, u32 who) {
  const size_t hash = ((size_t)from >> 4) * 31 + ((size_t)with >> 4) + who;
  return changes[hash * 0x9e3779b97f4a7c15u >> 58];
}

void Times::raise_to(u32 who, u32 value, bool alike) {
  if (who == own) {
    when = std::max(when, value);
  } else if ((*shared)[who] >= value) {
  } else if (shared.use_count() == 1) {
    (*shared)[who] = value;
  } else {
    Change now = {shared, nullptr, nullptr, who, value};
    Change &c = alike ? change_of(shared.get(), nullptr, who) : now;
    if (!c.to || c.from != shared || c.with || c.who != who || c.when != value) {
      c = now;
      c.to = std::make_shared<std::vector<u32>>(*shared);
      (*c.to)[who] = value;
    }
    joined = shared;
    shared = c.to;
  }
}

void Times::settle() {
  const u32 who = own;
  own = NOBODY;
  if (who != NOBODY) raise_to(who, when);
}

void Times::adopt(const Times &o) {
  if (own != NOBODY) when = std::max(when, o[own]);
  shared = o.shared;
  joined = o.joined;
}

void Times::raise(const Times &o) {
  if (o.shared != shared && o.shared != joined) {
    const u32 mine = own < o.shared->size() ? (*o.shared)[own] : 0;
    if (o.joined == shared) {
      shared = o.shared;
    } else if (shared.use_count() > 1) {
      Change &c = change_of(shared.get(), o.shared.get(), 0);
      if (c.from != shared || c.with != o.shared) {
        c = {shared, o.shared, std::make_shared<std::vector<u32>>(shared->size()), 0, 0};
        ::raise(c.to->data(), shared->data(), o.shared->data(), shared->size());
      }
      shared = c.to;
    } else {
      ::raise(shared->data(), shared->data(), o.shared->data(), shared->size());
    }
    joined = o.shared;
    when = std::max(when, mine);
  }
  if (o.own != NOBODY) raise_to(o.own, o.when);
}

void Times::lower(const Times &o) {
  const u32 mine = own == NOBODY ? 0 : std::min(when, o[own]);
  if (o.shared != shared || (o.own != NOBODY && o.own != own && o.when < (*shared)[o.own])) {
    const Shared to = std::make_shared<std::vector<u32>>(shared->size());
    ::lower(to->data(), shared->data(), o.shared->data(), to->size());
    if (o.own != NOBODY) (*to)[o.own] = std::min((*shared)[o.own], o.when);
    shared = to;
    joined = nullptr;
  }
  when = mine;
}

/* ---- clocks -------------------------------------------------------------------------------- */

void Clock::reset(size_t n, u32 value, u32 own) {
  seen.reset(n, value, own);
  for (Times &x : fenced) x.reset(n, value, own);
  launched = false;
  carried.reset(n, 0, NOBODY);
}

void Clock::join(const Clock &o) {
  seen.raise(o.seen);
  for (int k = 0; k < PROXIES; k++) fenced[k].raise(o.fenced[k]);
  carried.raise(o.carried);
  launched |= o.launched;
}

void Clock::meet(const Clock &o) {
  seen.lower(o.seen);
  for (int k = 0; k < PROXIES; k++) fenced[k].lower(o.fenced[k]);
  carried.lower(o.carried);
  launched &= o.launched;
}

void Clock::settle() {
  seen.settle();
  for (int k = 0; k < PROXIES; k++) fenced[k].settle();
}

void Clock::adopt(const Clock &o) {
  seen.adopt(o.seen);
  for (int k = 0; k < PROXIES; k++) fenced[k].adopt(o.fenced[k]);
  carried = o.carried;
  launched = o.launched;
}
