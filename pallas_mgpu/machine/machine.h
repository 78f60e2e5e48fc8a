/* The emulated machine: what its files share.
 *
 * A few clusters of blocks run at a time, as many as the seed says. Every CUDA thread is a fiber; a
 * scheduler picks one at random, seeded, and lets it run until it must wait. Copies and matrix
 * products are operations of engines, which are carried out later, at moments the scheduler picks:
 * with nothing left to run at the latest.
 *
 * Order is checked, not only tried out. Each thread carries vector clocks over all agents: `seen`,
 * what is ordered before it, and `fenced`, what is so and passed a proxy fence on the way, of
 * shared memory (accesses by threads of its block, and by those of others) and of global memory.
 * Barriers join them. Each byte of memory remembers who wrote it and who read it since, and when by
 * that one's clock; an access that is not ordered after them is an error. Engines see generic
 * writes only through `fenced`. Agents are the threads of the cluster, then what engine operations
 * are awaited by: an mbarrier, the products of a warp, and for a thread with bulk stores what they
 * read and what they write. The clock of such a one counts operations, or phases, in the order of
 * the waits. */
#ifndef HOST_MACHINE_H
#define HOST_MACHINE_H

#include <stddef.h>
#include <stdint.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "catalogue.h"

struct Block;
struct Warp;
struct Thread;

/* ---- clocks -------------------------------------------------------------------------------- */

enum : u16 { NOBODY = 0xffff, MANY = 0xfffe }; /* beside the numbers of agents */

/* One entry for each agent: up to which of its steps. See clocks.cpp. */
class Times {
 public:
  bool empty() const { return !shared; }
  u32 operator[](u32 who) const { return who == own ? when : (*shared)[who]; }
  void reset(size_t n, u32 value, u32 who); /* who: the agent whose clock it is, or NOBODY */
  /* alike: others with this knowledge learn the same next */
  void raise_to(u32 who, u32 value, bool alike = false);
  void raise(const Times &other);
  void lower(const Times &other);
  void settle();                  /* it is nobody's from now on */
  void adopt(const Times &other); /* which is nobody's, and later than this */

 private:
  using Shared = std::shared_ptr<std::vector<u32>>;
  Shared shared, joined; /* joined: no entry of it is above that of `shared` */
  u32 own, when;         /* the agent whose entry is `when`; no less than that of `shared` */
};

/* Memory that a proxy fence covers. FAR: shared memory, accesses by threads of other blocks. */
enum { NEAR, GLOBAL, FAR, PROXIES };

struct Clock {
  Times seen, fenced[PROXIES];
  bool launched = false; /* it comes after the launches before this one (griddepcontrol.wait) */
  Times carried;         /* accesses of tensor memory that a tcgen05.fence::before_thread_sync, or a
                            commit, follows: a fence::after_thread_sync makes use of it */
  void reset(size_t n, u32 value, u32 own);
  void join(const Clock &other);
  void meet(const Clock &other); /* what both know */
  void settle();                 /* as those of Times */
  void adopt(const Clock &other);
};

/* ---- memory -------------------------------------------------------------------------------- */

enum : u16 { MAX_READERS = 16 };

/* of one byte */
struct Mark {
  u32 write, read; /* by the clock of the one who did it */
  u16 writer, reader;
  u16 write_line, read_line;
  u16 wrote, was_read; /* clusters, for global memory; 0: none */
  u8 barrier;          /* part of an mbarrier */
  u8 atomic;           /* the writes were atomic: another atomic needs no order after them */
  u16 copied;          /* line of the cp.async that may still write it; 0: none */
};

/* Reads by engines, of 16 bytes: which of them, by whom and when. */
struct EngineReads {
  u32 n;
  struct {
    u16 who, line, mask, cluster;
    u32 when;
  } at[MAX_READERS];
};

/* By several agents, and when each did it; most are of neighbours. */
struct Accesses {
  u32 first = 0;         /* agent */
  std::vector<u32> when; /* of it and those after it; 0: none */
  void set(u32 who, u32 value);
};

/* several threads read a byte, or wrote the same value to it, in no order */
struct Crowd {
  Accesses read, write;
};

/* The last plain write of a byte before atomics, which may come in any order among themselves, but
 * all of them after it. many: not empty, several threads wrote the same value */
struct PlainWrite {
  u32 write;
  u16 writer, line;
  Accesses many;
};

struct Region {
  const char *name;
  u32 number = 0; /* of the block in its cluster, or of the buffer */
  u8 *bytes = nullptr;
  u32 base = 0; /* address of shared memory */
  size_t size = 0;
  bool counters = false; /* of the launch, and semaphores */
  bool global = false, born_written = false, read_only = false;
  std::vector<Mark> marks;
  std::vector<EngineReads> engine_reads; /* empty until there are some */
  std::unordered_map<size_t, Crowd> crowds;
  std::unordered_map<size_t, PlainWrite> before_atomics;
  void forget();
};

void host_end_of_devices(); /* did others use their memory after their kernels? */
void thread_reads(Region &r, size_t at, size_t n, int line);
void thread_writes(Region &r, size_t at, const void *from, size_t n, int line);
/* by operation `when` of agent `who`; it was issued in `line` by one who knew `known` */
struct Stamp {
  u16 who;
  u32 when;
  int line;
  const Clock *known;
  u16 cluster;
};
void engine_reads(Region &r, size_t at, size_t n, const Stamp &s, void *to);
/* update: it may come in any order with other updates and atomics */
void engine_writes(Region &r, size_t at, const void *from, size_t n, const Stamp &s,
                   bool update = false);
/* offset in the block's shared memory of an access */
size_t shared_offset(Block &b, u32 a, size_t bytes, size_t align, const char *what, int line);
Region &global_region(const void *p, size_t bytes, size_t align, const char *what, int line,
                      size_t *at);

/* ---- blocks -------------------------------------------------------------------------------- */

struct Mbarrier {
  u32 expected, pending;
  i64 tx;
  u64 phase;
  int init_line;
  u16 init_by;
  u32 init_at;
  bool fenced, published, has_bytes;
  Clock gathered, passed; /* of arrivals; of phases that are complete */
  Clock far, far_passed;  /* the same of releases by other blocks: for waits with cluster scope */
  bool shared;            /* bytes also come from other blocks, and then before they are expected */
  u16 agent;
  bool copied, awaited; /* bytes arrived in the phase before this one; somebody waited for it */
  u64 copied_phase;
  u64 late_phase = 0; /* which seems incomplete to that many more tests */
  u32 late = 0;
  std::vector<Thread *> waiters;
};

struct NamedBarrier {
  u32 expected = 0, any = 0, all = 1; /* of what the threads vote */
  int line;
  std::vector<Thread *> arrived;
  std::vector<std::pair<Thread *, Clock>> gone; /* arrived too, with what they did until then */
};

struct Operation;
struct TensorOp;
struct TensorMove;

struct BulkGroup {
  std::vector<std::shared_ptr<Operation>> ops;
  bool awaited = false;
};

struct LaneGroup; /* cp_async.cpp */

/* What a thread waits for: a format of two numbers, and what stands after it. */
struct WaitsFor {
  const char *format;
  u32 a, b;
  const char *what;
};

struct Thread : HostThread {
  void *stack_pointer;
  u8 *stack;
  Block *block;
  Warp *warp;
  u32 number, lane, rank; /* in the block; in the warp; in the cluster */
  bool done;
  int line;
  WaitsFor waits_for = {"", 0, 0, ""}; /* while it sleeps */
  char awaited[48] = "";               /* which semaphore */
  i64 site = -1;                       /* of the check that ends its wait */
  bool late = false;                   /* that wait was ended */
  Clock clock;
  BulkGroup open_group;
  std::vector<BulkGroup> groups;
  std::shared_ptr<LaneGroup> lane_group;               /* cp.async in no group yet; null: none */
  std::vector<std::shared_ptr<LaneGroup>> lane_groups; /* not waited for; null: empty ones */
  u16 reads, writes;                                   /* agents of its bulk stores, 0: none yet */
  u32 stores;
  u32 any, all;                 /* what the last bar.red found */
  Clock told;                   /* at the fence in front of relaxed signals */
  std::vector<u8> fenced_stack; /* as it was at the last wgmma.fence: registers live there */
  Times ordered; /* accesses of tensor memory before what it does there from now on */
  std::vector<std::shared_ptr<TensorOp>> tensor_ops; /* issued and not done, in order */
  u16 tensor;                                        /* their agent, 0: none yet */
  u32 n_tensor_ops, tensor_access, tensor_line; /* the last one that accesses memory; its line */
};

/* what a lane brings to an instruction that a warp executes together */
struct Request {
  const char *what;
  int line;
  u32 mask;
  u32 a, b;
  void *p;
  u32 result;
};

/* accumulator registers that belong to the tensor core */
struct Flight {
  void *registers[32];
  u32 words;
  std::vector<u32> value;
};

struct Warp {
  Block *block;
  Thread *lane[32];
  u32 arrived;
  Request *request[32];
  u32 registers, issued; /* instructions of the whole warpgroup */
  bool needs_fence = true;
  std::vector<std::shared_ptr<Flight>> flights;
  std::vector<std::shared_ptr<Operation>> products; /* nobody waited for them yet, in order */
  u32 groups, count;                                /* committed; products */
  std::vector<u32> last;                            /* per group: clock of its last product */
  u16 agent;                                        /* 0: none yet */
  /* loads from tensor memory, and stores to it, that nobody waited for */
  std::vector<std::shared_ptr<TensorMove>> moves[2];
  u16 mover[2]; /* their agents */
  u32 n_moves[2];
};

/* 32 bits of tensor memory: who wrote them, and who read them since. */
struct Cell {
  u32 value, write;
  u16 writer, write_line;
  u8 n_readers;
  struct {
    u16 who, line;
    u32 when;
  } reader[3];
};

struct TensorMemory {
  std::vector<Cell> cells;      /* [512][128], empty until something is allocated */
  std::map<u32, u32> allocated; /* columns, by the first one */
  bool relinquished = false;
  u32 taken = 0, tries = 0; /* columns that a block of another launch holds, for so many tries */
};

struct Warpgroup {
  std::vector<std::string> issued; /* all its warps must execute these */
  std::vector<Thread *> waiters;   /* for groups that other warps have not committed */
};

struct Arrival {
  u16 who;
  u32 when;
  int line;
};

struct Block {
  HostIndex index, in_cluster;
  u16 cluster;    /* number among those of the launch, from 1 */
  bool no_more;   /* of its cluster's first block: try_cancel has told that nothing is left */
  u32 device = 0; /* of the mesh */
  Region shared;
  TensorMemory tensor;
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::vector<Warpgroup> warpgroups;
  std::map<u32, Mbarrier> mbarriers;
  NamedBarrier named[16];
  u32 free_registers;
  std::vector<Thread *> want_registers;
  u32 alive;
  std::vector<Arrival> arrivals; /* of threads of other blocks, at its barriers */
  Times met;                     /* what preceded the latest barrier of the cluster */
};

/* ---- engines ------------------------------------------------------------------------------- */

struct Operation {
  int line;
  Block *block;
  Clock clock;             /* of the one who issued it, then */
  virtual bool step() = 0; /* true: done */
  virtual ~Operation() {}
};

/* An instruction of the tensor core that one thread issued. Those of a thread take effect in order,
 * at any time after. */
struct TensorOp : Operation {
  Thread *thread;
  Times known; /* accesses of tensor memory that it comes after */
  u16 who;
  u32 when;
  bool done = false;
  bool step() final;
  virtual void execute() = 0;
};
void host_issue_tensor(std::shared_ptr<TensorOp> op, bool accesses, int line);
/* of one cell, by operation `when` of agent `who` that knows `known` */
u32 tensor_read(Block &b, u32 lane, u32 column, const Times &known, u16 who, u32 when, int line);
void tensor_write(Block &b, u32 lane, u32 column, u32 value, const Times &known, u16 who, u32 when,
                  int line);
void host_tensor_group(u32 ctas, int line); /* an instruction of one block, or of a pair */
Block &host_pair_of(Block &b, int line);    /* the other one */
void host_tensor_ends(Block &b);            /* nothing of the block is left behind */
/* 16 bytes from an engine, and their barrier */
void host_answer(Block &b, u32 at, u32 barrier, const u32 *words, const Clock &known, int line);
u32 host_barrier_for_bytes(Block &b, u32 barrier, const char *what, int line);

/* A counter that threads signal and wait for. A wait may end as soon as the first signals suffice,
 * so it learns of those and no others, also if there are more by now. */
struct Signal {
  u64 total;      /* of it and those before */
  Clock released; /* the same */
};
struct Semaphore {
  std::vector<Signal> signals;
  u64 total = 0, taken = 0; /* by signals, by waits */
  std::vector<Thread *> waiters;
};

/* What an agent that is an engine stands for. */
enum AgentKind : u8 {
  OF_BARRIER,
  OF_PRODUCTS,
  OF_STORE_READS,
  OF_STORE_WRITES,
  OF_TENSOR_CORE,
  OF_TMEM_LOADS,
  OF_TMEM_STORES
};
/* The first block of a cluster, and its device. */
struct Began {
  HostIndex first;
  u32 device;
};

struct Agent {
  AgentKind kind;
  u32 block, number; /* byte of the mbarrier; warp, also of TMEM; thread of the block */
};

struct Machine {
  HostIndex grid, cluster;
  bool together;   /* blocks wait for each other: all of them run at once */
  bool crowded;    /* multiprocessors have as many blocks as fit */
  bool far_stores; /* threads have stored to shared memory of other blocks */
  bool dependent;  /* the launch may begin before the one before it has ended */
  u32 cluster_blocks;
  std::vector<Began> began;    /* by their number - 1 */
  bool polled;                 /* a thread looks again and again: engines must move too */
  u64 polled_progress;         /* then */
  u32 polls;                   /* since there was progress */
  u32 devices = 1, n_args = 0; /* of a mesh; arguments of each */
  u64 stride = 0;              /* from what one device has to the same of the next one */
  std::map<const void *, Semaphore> semaphores; /* by their word */
  std::map<const void *, Clock> variables;      /* of the program: what was released there */
  u32 block_threads, shared_bytes;
  u32 n_clock, first_engine; /* entries of a clock: of threads, and of engines from there on */
  u64 random;
  u32 eagerness;    /* an engine moves in one of so many turns; 0: only when it must */
  u32 clock;        /* all clocks of this cluster began after it */
  u32 engines, top; /* agents that are engines; the latest clock of any */
  std::vector<Agent> agents;
  const u8 *loose; /* by line: lanes of one warpgroup may store to one place there, one wins */
  u32 n_loose;
  bool leaves;           /* failed checks are noted, and the program goes on */
  bool stopped;          /* there was one */
  bool may_be_unwritten; /* reading what was never written is no error */
  u32 leader;            /* the lane that elect.sync elects */
  u64 progress;          /* grows while something goes on; threads that only poll do not count */
  u32 steps;             /* turns of threads, and looks at the clock */
  std::vector<Block> blocks;
  std::vector<Thread *> ready;
  std::vector<std::shared_ptr<Operation>> pending; /* copies, and the products of warps in front */
  u32 tensor_ctas;          /* what all tcgen05 instructions of the launch have, 0: none yet */
  std::vector<u32> waiting; /* clusters that have not begun */
  std::vector<Region> global;
  Thread *self;
};
extern Machine m;
enum { STACK_BYTES = 1 << 20 };

u32 host_random(u32 below);
void host_issue(std::shared_ptr<Operation> op);
void host_finish(Operation *op); /* now */
void host_sleep(const char *format, u32 a = 0, u32 b = 0, const char *what = "");
void host_wake(Thread *t);
void host_yield();
extern "C" void host_yield_poll();
/* All lanes of `mask` meet. The last one calls `act` for all, then everyone goes on. */
void host_meet(Request *r, void (*act)(Warp &));
void host_same(Warp &w, const char *what, int line);
void host_products_end(Warp &w); /* nothing of the warp is left behind */
void host_lane_copies_end(const Thread &t);
std::string host_place_of(Block &b, u32 offset);
/* What a client that knows names makes a message of: "key value" pairs, one line each fact. */
void host_fact(const char *format, ...) __attribute__((format(__printf__, 1, 2)));
/* One of the accesses that a message is about; who: an agent, line: where it was made. */
void host_fact_access(const char *touch, const Region &r, i64 at, u16 who, int line);
/* Of a cell of tensor memory; its column counts from the first that the block has allocated. */
void host_fact_cell(const char *touch, const Block &b, u32 lane, u32 column, u16 who, int line);
std::string host_name_of(const Block &b);
std::string host_name_of(const Began &c);
u16 host_new_agent(AgentKind kind, const Block *b, u32 number);
/* clock of operation n, from 1, of an engine */
u32 host_when(u64 n);
void host_release(Thread *t); /* what it does from now on comes after what it did */

/* tensor.cpp */
u32 host_element_bits(u8 type);
f32 host_element(u8 type, const u32 *words, u32 i);
void host_fragment_a(u8 type, const u32 *registers, u32 l, f32 *a);
void host_accumulate(u8 acc, u32 *d, u32 i, f32 s);

static inline Thread *host_thread() { return m.self; }

/* The blocks of one cluster, by rank. */
struct Cluster {
  Block *first;
  Block *begin() const { return first; }
  Block *end() const { return first + m.cluster_blocks; }
  Block &operator[](size_t rank) const { return first[rank]; }
  size_t size() const { return m.cluster_blocks; }
};
/* The address in block b of what `a`, in the window of the cluster, names there. */
static inline u32 host_in_block(const Block &b, u32 a) {
  return (a & 0xffffff) + (b.shared.base & ~0xffffffu);
}

static inline u32 host_rank_of(const Block &b) {
  return (u32)(&b - &m.blocks[0]) % m.cluster_blocks;
}
static inline Cluster host_cluster_of(const Block &b) {
  return {const_cast<Block *>(&b) - host_rank_of(b)};
}

#endif
