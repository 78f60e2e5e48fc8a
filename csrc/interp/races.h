/* The race detector: what orders agents (clocks.c), who touched memory last (shadow.c), and the
 * verdicts (races.c). The machine calls it only where m->races is set. */
#ifndef PM_RACES_H
#define PM_RACES_H

#include "vm.h"

/* How much of a component is ordered before an agent: before its plain accesses; before what
 * engines do to SMEM for it, after plain stores and after plain loads; the same after plain
 * stores, where only the commit_smem calls of the kernel's author count; before its accesses to
 * tensor memory, and what will be once it has waited on a barrier with orders_tensor_core. */
enum view { SEEN, FENCED, DRAINED, BY_AUTHOR, CARRIED, TENSOR, VIEWS, SAME_BYTES = VIEWS };

struct seen {
  uint32_t id, at[VIEWS];
};

/* The component of the kernels that were launched earlier: 1 for who waited for them. */
#define EARLIER_KERNELS UINT32_MAX

/* Where a component is listed, or would be. */
static inline uint32_t pm_clock_place(const vclock *c, uint32_t id) {
  uint32_t low = 0, high = c->n;
  while (low < high) {
    const uint32_t middle = (low + high) / 2;
    if (c->at[middle].id < id) low = middle + 1;
    else high = middle;
  }
  return low;
}

/* How much of a component is ordered. */
static inline uint32_t pm_clock_at(const vclock *c, uint32_t id, enum view v) {
  const uint32_t k = pm_clock_place(c, id);
  if (k < c->n && c->at[k].id == id) return c->at[k].at[v];
  return id < c->floor ? UINT32_MAX : 0;
}

/* The components of a cluster: of each kind one for each agent, or for each barrier. */
typedef enum component {
  OWN,         /* plain accesses: an agent's own time */
  STORE_READS, /* bulk groups whose SMEM was read */
  STORES,      /* groups that are complete: bulk groups, or of cp.async */
  PRODUCTS,    /* wgmmas that are complete */
  LOADS,       /* from tensor memory, by the waits after them */
  COPIES,      /* of a barrier: phases that TMA had a part in */
  REMOTE,      /* of a barrier: the same of st.async */
  COMPONENTS,
  PER_AGENT = COPIES
} component;

/* Who made an access. LANES: plain loads and stores that do the work of an engine. */
typedef enum maker { THREAD, LANES, TMA, TENSOR_CORE, ST_ASYNC, CP_ASYNC } maker;
typedef enum touch { READ, WRITE, ATOMIC } touch;

/* An access, as the shadow remembers it. Who has seen `time` of the component knows it complete. */
typedef struct event {
  uint32_t id, time;
  const instr *i;
  const access *mem;
  int64_t first, last; /* elements of the base; last < first: not known; see `single` */
  int64_t cluster;     /* -> the point of the grid */
  uint16_t block;      /* of the cluster */
  uint8_t thread;
  int8_t warp; /* -1: none */
  uint8_t maker, touch;
  bool committed; /* of tensor cores: awaited by a commit, not by wgmma_wait */
  bool single;    /* accesses of one element each, alike but for the place; first: the byte of the
                     region where the base begins */
  bool marked;
} event;

/* ---- shadow memory -------------------------------------------------------------------------- */

enum { PAGE = 16384, MOST_SINCE = 16, MOST_RUNS = 2048 };
enum { MOST_PERIOD = PAGE / 2, MOST_COMB = 2048, MOST_CUTS = 64, MOST_DONE = 8, RECENT = 1024 };
#define COMB 0x80000000u /* in mark.write */

/* Bytes up to `to` of a page: the last write, and the list of those who read, or changed them by
 * an atomic operation, since. Or the number of a comb in `write`, with COMB, and 0. */
typedef struct mark {
  uint32_t to, write, since;
} mark;

/* The marks of one period. at NULL: a free entry */
typedef struct comb {
  uint32_t next, period, n;
  bool marked;
  mark *at;
} comb;

typedef struct marks {
  mark *at;
  uint32_t n, cap;
} marks;

/* What an access made of a mark that is `period` long at least. */
typedef struct done {
  uint32_t write, since, period, to_write, to_since;
} done;

typedef struct page {
  uint32_t n, cap; /* n 0: nobody touched it */
  mark *at;
} page;

/* The SMEM of a block, or an argument. */
typedef struct region {
  page *pages;
  size_t n_pages;
} region;

/* A list never changes. */
typedef struct since {
  uint32_t event, next;
  bool marked;
} since;

/* live: entries in use after the last sweep; taken: since then */
typedef struct pool {
  void *at;
  uint32_t n, cap, free, live, taken;
} pool;

/* Writes of one point of the grid over those of another: no race where the bytes are equal, as both
 * bring the same. */
typedef struct rewrite {
  uint32_t event;
  size_t from, to;
} rewrite;

typedef struct shadow {
  pool events, lists, combs;
  uint32_t recent[RECENT]; /* events of single elements, by a hash */
  size_t comb_bytes, live_comb_bytes;
  marks made, page; /* scratch: of a comb, of a page */
  /* what is being touched of each period: marks whose `write` is 1 */
  mark cuts[2 * MOST_CUTS + 3];
  uint32_t n_cuts, period;
  done done[MOST_DONE];
  rewrite *rewrites; /* by the access that is being made */
  uint32_t n_rewrites, cap_rewrites;
  region *regions; /* SMEM by block, then arguments */
  uint32_t n_regions;
  size_t bytes;
  bool full, no_memory;
} shadow;

/* Two accesses that meet and are not ordered. */
typedef struct conflict {
  uint32_t event; /* 0: none */
  uint8_t lacks;  /* enum view; SAME_BYTES: order, but it makes no difference */
  size_t from, to;
} conflict;

/* An access that is being made. */
typedef struct touching {
  shadow *shadow;
  const vclock *clock; /* what is ordered before it */
  event *event;        /* its own */
  uint32_t number;     /* of the event */
  bool engine;         /* to SMEM, by the async proxy */
  bool others;         /* the grid has other points */
  conflict write, since, by_author;
  uint32_t fine_write, fine_since; /* what was looked at last, without a conflict */
  uint32_t grown_from, grown_to;   /* what a list became */
  uint32_t n_done;                 /* of shadow.done */
} touching;

static inline event *pm_shadow_at(const shadow *s, uint32_t k) { return (event *)s->events.at + k; }
void pm_shadow_touch(touching *x, region *g, size_t from, size_t to);
/* Several runs of bytes of one page, by rising addresses. */
typedef struct run {
  uint32_t from, to;
} run;
void pm_shadow_touch_runs(touching *x, region *g, size_t page, const run *runs, uint32_t n);
/* The same runs of each period of a range, from its first byte on; MOST_CUTS of them at most. */
void pm_shadow_touch_periods(touching *x, region *g, size_t from, size_t to, uint32_t period,
                             const run *runs, uint32_t n);
/* The number of a new event; 0: no memory. */
uint32_t pm_shadow_event(shadow *s, const event *e);
/* Forgets what no byte remembers, where there is much of it. */
void pm_shadow_sweep(shadow *s);
typedef void shadow_visit(void *ctx, const event *e, size_t from, size_t to);
/* All accesses that the region remembers, and to which bytes; several times if to several runs. */
void pm_shadow_visit(shadow *s, const region *g, shadow_visit *visit, void *ctx);
void pm_shadow_clear(shadow *s, region *g);
void pm_shadow_free(shadow *s);

/* An access that is given run by run of bytes; begun only if region is set. */
typedef struct tracker {
  pm_machine *m;
  event event;
  touching touching;
  region *region;
  bool early;                   /* nobody has waited for the kernels before this one */
  const char *low, *base;       /* of the region, of the ref */
  const char *lowest, *highest; /* elements */
  /* not yet in the shadow: a run of bytes, and before it some of one page */
  size_t from, to, page;
  run runs[MOST_RUNS];
  uint32_t n_runs;
} tracker;

bool pm_race_begin_elements(tracker *x, pm_machine *m, const thread *t, const instr *i,
                            const located *s, int touch);
/* The store that was reported last has been made. */
step pm_race_stored(pm_machine *m);
void pm_race_element(tracker *x, const char *at, size_t bytes);
step pm_race_end_elements(tracker *x);
/* Room for n places, then so many of them are touched; rising: each comes after the one before. */
const char **pm_race_places(pm_machine *m, int64_t n);
step pm_race_end_places(tracker *x, uint32_t n, bool rising);

/* ---- a run ---------------------------------------------------------------------------------- */

typedef struct signalled {
  int64_t total; /* of all signals so far */
  vclock clock;  /* of all signals so far */
} signalled;

typedef struct semaphore_order {
  signalled *at;
  uint32_t n, cap;
  int64_t total, taken;
  bool counts; /* total is what it was at first, and signals since */
} semaphore_order;

/* A semaphore that is a word of an argument. */
typedef struct word_order {
  const uint32_t *at;
  semaphore_order order;
} word_order;

typedef struct agent_order {
  vclock clock;
  uint32_t products; /* issued */
  uint32_t loads;    /* waits for loads from tensor memory */
  uint32_t stores;   /* the last bulk group with a store, from 1; 0: none */
  pm_opid store;     /* in it */
} agent_order;

typedef struct barrier_order {
  vclock open, done; /* of the phase that is open, of the last one that is complete */
  uint32_t phases;   /* complete, since the cluster began */
} barrier_order;

/* Each pair of lines is reported once. second: 0: a note */
typedef struct reported {
  pm_opid first, second;
} reported;

struct races {
  uint32_t n_agents, n_barriers, each; /* of a cluster; each: its components */
  uint32_t instances;                  /* clusters begun */
  uint32_t *instance;                  /* by place in machine.clusters */
  agent_order *agents;                 /* as machine.threads */
  barrier_order *barriers;             /* by block */
  vclock *named, *turns;               /* by block */
  semaphore_order *semaphores, *block_semaphores;
  word_order *words;
  uint32_t n_words, cap_words;
  vclock *ends; /* by device: what comes before the end of its kernel; NULL: there is one device */
  vclock all;   /* scratch */
  shadow shadow;
  tracker storing; /* the access that shadow.rewrites are of, and the bytes that were there */
  char *old;
  size_t old_bytes;
  const char **places; /* scratch: twice cap_places */
  size_t cap_places;
  uint32_t *root; /* by argument: the first one in the same memory */
  reported *reported;
  uint32_t n_reported, cap_reported;
  bool no_memory;
};

/* The wait that completes the agent's loads from tensor memory. */
uint32_t pm_race_next_loads(const pm_machine *m, const thread *t);
/* The component of this kind of an agent, or of a barrier. */
uint32_t pm_race_agent_id(const pm_machine *m, component kind, const thread *t);
uint32_t pm_race_barrier_id(const pm_machine *m, component kind, const barrier *b);
component pm_race_kind(const races *r, uint32_t id);

#endif
