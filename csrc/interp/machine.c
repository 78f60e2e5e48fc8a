/* The virtual machine: scheduler, scopes, waits, control.
 *
 * Clusters begin in row-major order of the grid; all blocks of a cluster run concurrently. Under
 * seed 0 one cluster runs at a time, under others as many as the seed says, up to those that fit on
 * a GPU. If blocks may wait for others of the launch (semaphores), so many always run. For a
 * dynamically scheduled kernel only a few clusters run, so that tiles are left for them to take.
 *
 * What blocks access in each other (cluster barriers, destinations and barriers of collective
 * copies, refs used by cluster_refs) is set up before any of them runs and checked when all have
 * ended. Everything else is set up and checked when a block enters and leaves its scope. Leaving a
 * scope does not wait: it checks what must be complete, and everything else in flight continues.
 *
 * The scheduler chooses at random, by the seed, among the ready threads and the pending tasks of
 * each kind. The likelihood of each kind of task is drawn once for each run, from "immediately" to
 * "not before a wait needs it", so that a missing wait shows under most seeds. Seed 0 is always
 * late. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "vm.h"

enum { THREAD_WEIGHT = 256, LATE = 1, EVEN = 64, EARLY = 16384, SLICE = 64 };
enum { REPORT_NS = 3000000 };
enum { FEW_CLUSTERS = 6 }; /* that run at once under most seeds */
enum { MOST_SHARING = 4 }; /* clusters of a kernel that hands out its grid */

static uint64_t next_random(pm_machine *m) { /* splitmix64 */
  uint64_t z = (m->random += 0x9e3779b97f4a7c15u);
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

static uint32_t below(pm_machine *m, uint64_t n) { /* n below 2^32 */
  return (uint32_t)((next_random(m) >> 32) * n >> 32);
}

/* ---- arrivals and waits ------------------------------------------------------------------- */

/* Does the block `from` signal the cluster barrier of the block `to`? */
static bool signals(const pm_machine *m, const barrier_info *info, const block *from,
                    const block *to) {
  uint32_t differ = 0; /* bit g: they differ in group g */
  for (uint32_t d = 0; d < m->n_cluster; d++) {
    if (info->leader && info->group[d] && to->coord[d]) return false;
    if (from->coord[d] != to->coord[d]) differ |= 1u << info->group[d];
  }
  return !(differ & 1) && !(differ & (differ - 1));
}

static step exec_arrive(pm_machine *m, thread *t, const instr *i) {
  barrier *b = pm_vm_barrier(m, t, i, i->mem);
  if (!b) return STEP_FAIL;
  if (b->info->tensor_core) pm_vm_tmem_told(t);
  if (b->info->tensor_core && m->races) pm_race_tell_tensor(m, t);
  if (!b->info->n_groups) {
    return pm_vm_arrive(m, t, i->op, b, 0) == STEP_FAIL ? STEP_FAIL : STEP_PAUSE;
  }
  int64_t at = b - b->block->bars;
  block *first = t->block->cluster->blocks;
  for (block *u = first; u < first + m->n_blocks; u++) {
    if (!signals(m, b->info, t->block, u)) continue;
    if (m->races && !i->lowered) pm_race_arrive(m, t, u->bars + at, true);
    if (pm_vm_arrive(m, t, i->op, u->bars + at, 0) == STEP_FAIL) return STEP_FAIL;
  }
  return STEP_PAUSE;
}

/* The thread that took the number writes it in each block, and the barrier there waits for that. */
static step exec_broadcast_tile(pm_machine *m, thread *t, const instr *i) {
  located s;
  if (t->index + 1 < m->n_threads) return STEP_NEXT;
  barrier *b = pm_vm_barrier(m, t, i, i->mem2);
  if (!b) return STEP_FAIL;
  pm_vm_locate(m, t, i->mem, &s);
  if (!s.inside) return pm_vm_outside(m, t, i->op, &s, "broadcast_tile");
  const int64_t at = s.at - t->block->smem, bar = b - b->block->bars;
  block *first = t->block->cluster->blocks, *to = t->block;
  for (block *u = first; t->block == first && u < first + m->n_blocks; u++) {
    memcpy(u->smem + at, slot_of(t, i->a), sizeof(int32_t));
    s.base += u->smem - to->smem;
    s.at += u->smem - to->smem;
    to = u;
    if (m->poison) pm_poison_defined(m, t, &s);
    if (m->races && pm_race_hand(m, t, i, &s, u->bars + bar) == STEP_FAIL) return STEP_FAIL;
    if (m->timeline) pm_time_arrive(m, t, i->op, u->bars + bar);
    if (pm_vm_transfer_done(m, t, i->op, u->bars + bar) == STEP_FAIL) return STEP_FAIL;
  }
  return pm_vm_arrive(m, t, i->op, b, 1) == STEP_FAIL ? STEP_FAIL : STEP_PAUSE;
}

/* What is wrong with a wait of the thread for its next phase, if anything. */
static step check_wait(pm_machine *m, thread *t, const instr *i, barrier *b) {
  char name[768], place[600];
  int64_t *seen = &b->seen[t->observer];
  const uneven *u = &b->uneven[t->index];
  if (u->map && u->partly && !t->of) {
    pm_race_note(m, i->op,
                 "this thread waits on barrier %s, on which its warps 0 to 3 waited %d, %d, %d and "
                 "%d times in the warp_map%s",
                 pm_vm_barrier_text(m, t, b, name, sizeof name), u->waits[0], u->waits[1],
                 u->waits[2], u->waits[3], pm_vm_place(m, u->map, place, sizeof place));
  } else if (u->map && !u->partly) {
    return pm_vm_fail(m, t, i->op, PM_E_VALUE,
                      "this thread waits on barrier %s, on which its warps 0 to 3 waited %d, %d, "
                      "%d and %d times in the warp_map%s: which phase comes next is not known. "
                      "The warps of a thread that wait on a barrier must wait equally often",
                      pm_vm_barrier_text(m, t, b, name, sizeof name), u->waits[0], u->waits[1],
                      u->waits[2], u->waits[3], pm_vm_place(m, u->map, place, sizeof place));
  }
  if (*seen == MISSED) {
    return pm_vm_fail(m, t, i->op, PM_E_VALUE,
                      "this thread waits on barrier %s, but when its scope was entered before, it "
                      "did not: phases completed there that it has not observed. A thread that "
                      "waits must wait for every phase",
                      pm_vm_barrier_text(m, t, b, name, sizeof name));
  }
  if (*seen < 0 && b->phase > 1) {
    return pm_vm_fail(
        m, t, i->op, PM_E_VALUE,
        "this thread waits on barrier %s for the first time, but %" PRId64
        " phases are "
        "complete already, the last one%s. A thread that waits must wait for every phase",
        pm_vm_barrier_text(m, t, b, name, sizeof name), b->phase,
        pm_vm_place(m, b->last_completion, place, sizeof place));
  }
  if (*seen < 0) *seen = 0;
  if (*seen + 1 < b->phase) {
    return pm_vm_fail(m, t, i->op, PM_E_VALUE,
                      "this thread waits for phase %" PRId64 " of barrier %s, but %" PRId64
                      " phases "
                      "are complete already, the last one%s. A phase may complete only after all "
                      "waiters observed the one before",
                      *seen + 1, pm_vm_barrier_text(m, t, b, name, sizeof name), b->phase,
                      pm_vm_place(m, b->last_completion, place, sizeof place));
  }
  return STEP_NEXT;
}

static step exec_test(pm_machine *m, thread *t, const instr *i) {
  barrier *b = pm_vm_barrier(m, t, i, i->mem);
  if (!b || check_wait(m, t, i, b) == STEP_FAIL) return STEP_FAIL;
  int64_t *seen = &b->seen[t->observer];
  const bool done = *seen < b->phase;
  *(uint8_t *)slot_of(t, i->dst) = done;
  if (!done) return pm_vm_poll(m, t);
  if (m->races) pm_race_wait(m, t, b);
  if (m->timeline) pm_time_wait(m, t, i->op, b);
  pm_vm_see_commit(m, b, ++*seen);
  return STEP_PAUSE;
}

static step exec_wait(pm_machine *m, thread *t, const instr *i) {
  char name[768];
  barrier *b = pm_vm_barrier(m, t, i, i->mem);
  if (!b || check_wait(m, t, i, b) == STEP_FAIL) return STEP_FAIL;
  int64_t *seen = &b->seen[t->observer];
  if (i->n && *(int32_t *)slot_of(t, i->a) != *seen) {
    return pm_vm_fail(m, t, i->op, PM_E_VALUE,
                      "barrier_wait: phase is %" PRId32 ", but this thread waited for %" PRId64
                      " phases of barrier %s before",
                      *(int32_t *)slot_of(t, i->a), *seen,
                      pm_vm_barrier_text(m, t, b, name, sizeof name));
  }
  LOG(m, t, i->op, PM_LOG_BARRIER, "%s phase %" PRId64 " of barrier %s",
      *seen == b->phase ? "waits for" : "has seen", *seen + 1,
      pm_vm_barrier_text(m, t, b, name, sizeof name));
  if (*seen == b->phase) {
    t->waits_for = b;
    t->pc--;
    return pm_vm_block_on(m, t, THREAD_AT_BARRIER);
  }
  if (m->races) pm_race_wait(m, t, b);
  if (m->timeline) pm_time_wait(m, t, i->op, b);
  pm_vm_see_commit(m, b, ++*seen);
  return STEP_PAUSE;
}

/* ---- ordered sections ---------------------------------------------------------------------- */

static step turn_fail(pm_machine *m, thread *t, const instr *i, const char *what) {
  return pm_vm_fail(
      m, t, i->op, PM_E_VALUE,
      "ordered_section(%u): thread %u %s; the threads 0 to %u take turns, one after the other",
      i->to, t->index, what, i->to - 1);
}

static step exec_enter_section(pm_machine *m, thread *t, const instr *i) {
  block *b = t->block;
  if (t->index >= i->to) return turn_fail(m, t, i, "is not one of them");
  if (b->in_section && b->turn == t->index) return turn_fail(m, t, i, "has its turn already");
  if (b->in_section || b->turn != t->index) {
    t->pc--;
    return pm_vm_block_on(m, t, THREAD_AT_TURN);
  }
  b->in_section = true;
  if (m->races) pm_race_enter_section(m, t);
  if (m->timeline) pm_time_enter_section(m, t, i->op);
  return STEP_PAUSE;
}

static step exec_leave_section(pm_machine *m, thread *t, const instr *i) {
  block *b = t->block;
  if (!b->in_section || b->turn != t->index) {
    return turn_fail(m, t, i, "leaves an ordered_section that it is not in");
  }
  b->in_section = false;
  b->turn = (b->turn + 1) % i->to;
  if (m->races) pm_race_leave_section(m, t);
  if (m->timeline) pm_time_leave_section(m, t, i->op);
  pm_vm_wake(m, b, THREAD_AT_TURN, NULL);
  return STEP_PAUSE;
}

/* ---- named barriers ----------------------------------------------------------------------- */

/* Who waits there goes on when the last lane has come. */
static step come_to(pm_machine *m, thread *t, const instr *i, bool waits) {
  const int32_t number = slot_i32(t, i->a);
  const int32_t most = (int32_t)(NAMED_BARRIERS - 1 - m->n_threads - m->n_section);
  const uint32_t mine = t->of ? 1u << (t->index * WARPS + t->warp) : 15u << (t->index * WARPS);
  char place[600];
  if (number < 0 || number >= most) {
    return pm_vm_fail(m, t, i->op, PM_E_INDEX,
                      "barrier is %d; the kernel has the named barriers 0 to %d for itself", number,
                      most - 1);
  }
  named_barrier *b = &t->block->named[number];
  if (!b->come) *b = (named_barrier){.lanes = i->to, .first = i->op};
  if (b->lanes != i->to) {
    return pm_vm_fail(m, t, i->op, PM_E_VALUE, "named barrier %d is for %u lanes here and for %u%s",
                      number, i->to, b->lanes, pm_vm_place(m, b->first, place, sizeof place));
  }
  if (b->come & mine) {
    return pm_vm_fail(
        m, t, i->op, PM_E_VALUE,
        "this %s arrives at named barrier %d again, and only %d of %u lanes have arrived "
        "since the round began%s",
        t->of ? "warp" : "thread", number, 32 * __builtin_popcount(b->come), b->lanes,
        pm_vm_place(m, b->first, place, sizeof place));
  }
  b->come |= mine;
  const uint32_t come = 32 * (uint32_t)__builtin_popcount(b->come);
  if (come > b->lanes) {
    return pm_vm_fail(m, t, i->op, PM_E_VALUE, "%u lanes come to named barrier %d, which is for %u",
                      come, number, b->lanes);
  }
  pm_vm_progress(m);
  if (m->races) pm_race_come(m, t, (uint32_t)number);
  if (m->timeline) pm_time_come(m, t, i->op, (uint32_t)number);
  if (come < b->lanes) {
    t->waits_named = b;
    return waits ? pm_vm_block_on(m, t, THREAD_AT_NAMED) : STEP_PAUSE;
  }
  b->come = 0;
  for (thread *u = m->threads; u < m->threads + pm_vm_agents(m); u++) {
    if (u->state != THREAD_AT_NAMED || u->waits_named != b) continue;
    if (m->races) pm_race_leave(m, u, (uint32_t)number);
    if (m->timeline) pm_time_leave(m, u, (uint32_t)number);
    pm_vm_make_ready(m, u);
  }
  if (m->races && waits) pm_race_leave(m, t, (uint32_t)number);
  if (m->timeline && waits) pm_time_leave(m, t, (uint32_t)number);
  if (m->races) pm_race_end_round(m, t->block, (uint32_t)number);
  return STEP_PAUSE;
}

static step exec_named_sync(pm_machine *m, thread *t, const instr *i) {
  return come_to(m, t, i, true);
}
static step exec_named_arrive(pm_machine *m, thread *t, const instr *i) {
  return come_to(m, t, i, false);
}

/* ---- scopes ------------------------------------------------------------------------------- */

static void reset_barrier(const pm_machine *m, barrier *x, const barrier_info *info, block *b) {
  int64_t *seen = x->seen;
  uneven *u = x->uneven;
  for (uint32_t j = 0; j < pm_vm_observers(m); j++) {
    const bool missed = seen[j] == MISSED || pm_max(seen[j], 0) < x->phase;
    seen[j] = info->again && missed ? MISSED : NEVER;
  }
  memset(u, 0, m->n_threads * sizeof *u);
  *x = (barrier){.info = info, .block = b, .seen = seen, .uneven = u};
}

/* `t`: the thread that enters, for what each has for itself. */
static void init_scope(pm_machine *m, block *b, const scope *s, const thread *t) {
  for (uint32_t k = 0; k < s->n_smem; k++) {
    const struct smem_alloc *x = &s->smem[k];
    const size_t at = x->at + (size_t)x->apart * t->index;
    LOG(m, t, x->op, PM_LOG_SMEM, "%" PRId64 " elements of %s are allocated", x->n,
        pm_dtypes[x->dtype].text);
    pm_interp_fill(x->dtype, m->options.zero_fill, b->smem + at, x->n);
    if (m->poison) pm_poison_scope(m, b, x, at);
  }
  for (uint32_t k = 0; k < s->n_bars; k++) {
    const barrier_info *info = &m->bars[s->bars[k]];
    uint32_t n = info->count;
    barrier *x = b->bars + info->first + pm_vm_first_of(m, s, t, &n);
    for (barrier *end = x + n; x < end; x++) {
      reset_barrier(m, x, info, b);
    }
  }
  for (uint32_t k = 0; k < s->n_sems; k++) {
    uint32_t n = s->sems[k].count, first = s->sems[k].first + pm_vm_first_of(m, s, t, &n);
    memset(b->semaphores + first, 0, n * sizeof *b->semaphores);
    if (m->races) pm_race_reset_semaphores(m, b, first, n);
  }
  for (uint32_t k = 0; k < s->n_tmem; k++) pm_vm_init_tmem(m, b, &s->tmem[k]);
  b->n_left[s->index] = 0;
}

/* The last thread has left. Nothing may be in flight to what ends, and barriers of a scope that is
 * entered again have no phase that somebody did not wait for: the device goes on with its number.
 * Elsewhere nobody need see the last completions. */
static step check_barrier(pm_machine *m, thread *t, pm_opid op, const barrier *b) {
  char name[768], place[600];
  int64_t most = 0;
  if (b->arrivals) {
    return pm_vm_fail(m, t, op, PM_E_VALUE,
                      "the scope of barrier %s ends with %u of %u arrivals of phase %" PRId64
                      " made%s, the last one%s. Wait for all of them before",
                      pm_vm_barrier_text(m, t, b, name, sizeof name), b->arrivals,
                      b->info->arrivals, b->phase + 1, b->pending ? " and copies in flight" : "",
                      pm_vm_place(m, b->last_arrival, place, sizeof place));
  }
  for (uint32_t k = 0; k < m->tasks[TASK_TENSOR].n; k++) {
    const task *commit = m->tasks[TASK_TENSOR].at[k];
    if (commit->barrier != b) continue;
    return pm_vm_fail(
        m, t, op, PM_E_VALUE,
        "the scope of barrier %s ends before the tcgen05_commit_arrive%s has arrived. "
        "Wait for it before",
        pm_vm_barrier_text(m, t, b, name, sizeof name),
        pm_vm_place(m, commit->i->op, place, sizeof place));
  }
  bool observed = true;
  for (uint32_t j = 0; j < m->n_threads; j++) {
    most = pm_max(most, b->seen[j]);
    observed &= b->seen[j] < 0 || b->seen[j] == b->phase;
  }
  if (!observed) {
    pm_race_note(m, b->last_completion,
                 "the scope of barrier %s ends with %" PRId64
                 " phases complete, and a thread that waits on it has observed fewer",
                 pm_vm_barrier_text(m, t, b, name, sizeof name), b->phase);
  }
  if (b->copied > most) {
    return pm_vm_fail(m, t, op, PM_E_VALUE,
                      "the scope of barrier %s ends while the copy%s may be in flight: no thread "
                      "waited for phase %" PRId64 ", in which it arrives. Wait for it before",
                      pm_vm_barrier_text(m, t, b, name, sizeof name),
                      pm_vm_place(m, b->last_copy, place, sizeof place), b->copied);
  }
  for (uint32_t j = 0; b->info->again && j < m->n_threads; j++) {
    if (b->seen[j] == b->phase || (b->seen[j] < 0 && most == b->phase)) continue;
    return pm_vm_fail(m, t, op, PM_E_VALUE,
                      "the scope of barrier %s ends with %" PRId64
                      " phases complete, the last one%s, but thread %u observed only %" PRId64
                      ". The scope is in a loop and can be entered again, with the barrier as it "
                      "is: wait for every phase, or allocate the barrier outside of the loop",
                      pm_vm_barrier_text(m, t, b, name, sizeof name), b->phase,
                      pm_vm_place(m, b->last_completion, place, sizeof place), j,
                      pm_max(b->seen[j], 0));
  }
  return STEP_NEXT;
}

/* Copies of a kind to SMEM that ends, before they do. */
static step check_loads(pm_machine *m, thread *t, pm_opid op, const scope *s, task_kind kind) {
  char place[600];
  for (uint32_t k = 0; k < m->tasks[kind].n; k++) {
    const task *load = m->tasks[kind].at[k];
    const char *at = load->smem.at;
    for (uint32_t j = 0; j < s->n_smem; j++) {
      const struct smem_alloc *x = &s->smem[j];
      const char *from = t->block->smem + x->at + (size_t)x->apart * t->index;
      if (at < from || at >= from + x->n * pm_dtypes[x->dtype].bytes) continue;
      return pm_vm_fail(
          m, t, op, PM_E_VALUE,
          "the scope of '%s' ends while the copy%s may still write to it. %s before",
          load->smem.mem->name, pm_vm_place(m, load->i->op, place, sizeof place),
          kind == TASK_LOAD ? "Wait on the barrier of the copy" : "Call wait_gmem_to_smem");
    }
  }
  return STEP_NEXT;
}

/* `shared`: barriers that live as long as the cluster, else the others. */
static step check_scope(pm_machine *m, thread *t, pm_opid op, const scope *s, bool shared) {
  if (!shared && pm_vm_check_semaphores(m, t, op, s) == STEP_FAIL) return STEP_FAIL;
  for (uint32_t k = 0; k < s->n_tmem; k++) {
    if (s->tmem[k].tmem.pair != shared) continue;
    if (pm_vm_check_tmem(m, t, op, &s->tmem[k]) == STEP_FAIL) return STEP_FAIL;
  }
  for (uint32_t k = 0; k < s->n_bars; k++) {
    const barrier_info *info = &m->bars[s->bars[k]];
    if (info->shared != shared) continue;
    uint32_t n = info->count;
    barrier *b = t->block->bars + info->first + pm_vm_first_of(m, s, t, &n);
    for (barrier *end = b + n; b < end; b++) {
      if (check_barrier(m, t, m->places[op].file ? op : info->op, b) == STEP_FAIL) return STEP_FAIL;
    }
  }
  if (!s->index) return STEP_NEXT;
  if (check_loads(m, t, op, s, TASK_LOAD) == STEP_FAIL) return STEP_FAIL;
  return check_loads(m, t, op, s, TASK_FETCH);
}

static step exec_enter(pm_machine *m, thread *t, const instr *i) {
  block *b = t->block;
  const scope *s = i->scope;
  if (!s->collective || m->n_threads == 1) {
    if (s->n_smem || s->n_bars || s->n_sems || s->n_tmem) init_scope(m, b, s, t);
    return STEP_NEXT;
  }
  if (b->n_entering && b->entering != s) {
    return pm_vm_fail(
        m, t, i->op, PM_E_VALUE,
        "this thread enters a collective scope while another thread of the block is "
        "entering a different one; all threads must execute the same scopes in the same "
        "order");
  }
  b->entering = s;
  if (++b->n_entering < m->n_threads) return pm_vm_block_on(m, t, THREAD_AT_SCOPE);
  b->n_entering = 0;
  for (uint32_t k = 0; k < m->n_threads; k++) {
    pm_vm_tmem_told(&m->threads[(size_t)(b - m->blocks) * m->n_threads + k]);
  }
  if (m->races) pm_race_meet(m, b);
  if (m->timeline) pm_time_meet(m, b);
  init_scope(m, b, s, t);
  pm_vm_wake(m, b, THREAD_AT_SCOPE, NULL);
  return STEP_PAUSE;
}

step pm_vm_leave(pm_machine *m, thread *t, const instr *i) {
  const scope *s = i->scope;
  char place[600];
  for (uint32_t k = 0; k < s->n_accs; k++) {
    const task *writer = pm_vm_writer_in(t, s->accs[k]);
    if (!writer) continue;
    return pm_vm_fail(m, t, i->op, PM_E_VALUE,
                      "the scope of accumulator '%s' ends while the wgmma%s may still write to it. "
                      "Read the accumulator or call wgmma_wait(0) before",
                      writer->acc.mem->name, pm_vm_place(m, writer->i->op, place, sizeof place));
  }
  bool shared = s->collective && m->n_threads > 1;
  if (shared && ++t->block->n_left[s->index] < m->n_threads) return STEP_PAUSE;
  return check_scope(m, t, i->op, s, false) == STEP_FAIL ? STEP_FAIL : STEP_PAUSE;
}

step pm_vm_end(pm_machine *m, thread *t, const instr *i) {
  if (m->races) pm_race_check_stores(m, t);
  t->block->n_done++;
  t->block->cluster->n_live--;
  m->n_live--;
  pm_vm_progress(m);
  pm_vm_block_on(m, t, THREAD_DONE);
  if (t->block->n_done < m->n_threads) return STEP_PAUSE;
  if (t->block->turn || t->block->in_section) {
    return pm_vm_fail(
        m, t, 0, PM_E_VALUE,
        "the kernel ends when it is thread %u's turn: threads have taken turns (ordered_section) "
        "unequally often",
        t->block->turn);
  }
  return check_scope(m, t, 0, i->scope, false) == STEP_FAIL ? STEP_FAIL : STEP_PAUSE;
}

/* ---- warps -------------------------------------------------------------------------------- */

/* Each warp goes on with a copy of all that the thread has. */
static step exec_warp_map(pm_machine *m, thread *t, const instr *i) {
  thread *w = pm_vm_warps(m, t);
  for (thread *end = w + WARPS; w < end; w++) {
    memcpy(w->frame, t->frame, m->frame_bytes);
    if (m->poison) memcpy(w->poison, t->poison, m->frame_bytes);
    w->pc = t->pc;
    for (uint32_t k = 0; k < m->n_barriers; k++) {
      int64_t *seen = t->block->bars[k].seen;
      seen[w->observer] = seen[t->observer];
    }
    t->block->cluster->n_live++;
    m->n_live++;
    pm_vm_make_ready(m, w);
  }
  if (m->races) pm_race_fork(m, t);
  if (m->timeline) pm_time_fork(m, t);
  t->n_warps = WARPS;
  t->pc = i->to;
  return pm_vm_block_on(m, t, THREAD_AT_WARPS);
}

/* All warps of the thread have ended: it has seen what any of them saw. */
static void join_waits(pm_machine *m, const thread *of, barrier *b, pm_opid map) {
  const thread *w = pm_vm_warps(m, of);
  const int64_t before = pm_max(b->seen[of->observer], 0);
  int64_t least = INT64_MAX, most = 0;
  uneven u = {.map = map};
  for (uint32_t k = 0; k < WARPS; k++) {
    const int64_t seen = b->seen[w[k].observer], n = pm_max(seen, 0) - before;
    u.waits[k] = (int32_t)n;
    if (n) least = pm_min(least, n);
    most = pm_max(most, n);
    b->seen[of->observer] = pm_max(b->seen[of->observer], seen);
  }
  bool all = true;
  for (uint32_t k = 0; k < WARPS; k++) all &= u.waits[k] == most;
  u.partly = least == most;
  if (most && !all) b->uneven[of->index] = u;
}

/* The thread goes on after its last warp. */
step pm_vm_warp_end(pm_machine *m, thread *t, const instr *i) {
  thread *of = t->of;
  t->block->cluster->n_live--;
  m->n_live--;
  pm_vm_block_on(m, t, THREAD_DONE);
  if (m->races) pm_race_end_warp(m, t);
  if (--of->n_warps) return STEP_PAUSE;
  if (m->timeline) pm_time_join(m, of, i->op);
  for (uint32_t k = 0; k < m->n_barriers; k++) join_waits(m, of, &of->block->bars[k], i->op);
  pm_vm_make_ready(m, of);
  return STEP_PAUSE;
}

/* ---- control ------------------------------------------------------------------------------ */

step pm_vm_jump(pm_machine *m, thread *t, const instr *i) {
  (void)m;
  t->pc = i->to;
  return STEP_NEXT;
}

step pm_vm_move(pm_machine *m, thread *t, const instr *i) {
  (void)m;
  for (const struct move *x = i->moves->at, *end = x + i->moves->n; x < end; x++) {
    memcpy(slot_of(t, x->dst), slot_of(t, x->src), x->bytes);
  }
  return STEP_NEXT;
}

static step exec_for(pm_machine *m, thread *t, const instr *i) {
  (void)m;
  if (slot_i32(t, i->a) >= slot_i32(t, i->b)) t->pc = i->to;
  return STEP_NEXT;
}

step pm_vm_next(pm_machine *m, thread *t, const instr *i) {
  (void)m;
  ++*(int32_t *)slot_of(t, i->a);
  t->pc = i->to;
  return STEP_NEXT;
}

static step exec_branch(pm_machine *m, thread *t, const instr *i) {
  (void)m;
  if (!*(uint8_t *)slot_of(t, i->a)) t->pc = i->to;
  return STEP_NEXT;
}

static step exec_switch(pm_machine *m, thread *t, const instr *i) {
  (void)m;
  t->pc = i->targets[pm_max(0, pm_min(slot_i32(t, i->a), (int64_t)i->n - 1))];
  return STEP_NEXT;
}

const handler pm_vm_SCOPE = {pm_vm_encode_scope, exec_enter, {0}};
const handler pm_vm_WARP_MAP = {pm_vm_encode_warp_map, exec_warp_map, {0}};
const handler pm_vm_FOR = {pm_vm_encode_for, exec_for, {.poison = pm_poison_rule_for}};
const handler pm_vm_WHILE = {pm_vm_encode_while, exec_branch, {.poison = pm_poison_rule_branch}};
const handler pm_vm_IF = {pm_vm_encode_if, exec_branch, {.poison = pm_poison_rule_branch}};
const handler pm_vm_SWITCH = {pm_vm_encode_switch, exec_switch, {.poison = pm_poison_rule_switch}};
const handler pm_vm_YIELD = {pm_vm_encode_nothing, NULL, {0}};
const handler pm_vm_ARRIVE = {
    pm_vm_encode_plain, exec_arrive, {.poison = pm_poison_rule_addresses}};
const handler pm_vm_WAIT = {pm_vm_encode_plain, exec_wait, {.poison = pm_poison_rule_addresses}};
const handler pm_vm_BARRIER_TEST = {
    pm_vm_encode_plain, exec_test, {.poison = pm_poison_rule_addresses}};
const handler pm_vm_BROADCAST_TILE = {
    pm_vm_encode_plain, exec_broadcast_tile, {.reaches = pm_vm_reaches_cluster}};
const handler pm_vm_ENTER_SECTION = {pm_vm_encode_section, exec_enter_section, {0}};
const handler pm_vm_LEAVE_SECTION = {pm_vm_encode_plain, exec_leave_section, {0}};
const handler pm_vm_NAMED_SYNC = {pm_vm_encode_plain, exec_named_sync, {0}};
const handler pm_vm_NAMED_ARRIVE = {pm_vm_encode_plain, exec_named_arrive, {0}};

/* ---- deadlock ----------------------------------------------------------------------------- */

static step deadlock(pm_machine *m) {
  pm_err *err = m->err;
  char agent[512], name[768], place[600];
  size_t at = 0, room = sizeof err->text;
  pm_opid first = 0;
  uint32_t listed = 0, blocked = 0;
  char text[sizeof err->text];
  at +=
      (size_t)snprintf(text, room, "deadlock: no thread of the kernel '%s' can continue", m->name);
  for (thread *t = m->threads; t < m->threads + pm_vm_agents(m); t++) {
    if (t->state == THREAD_DONE || t->state == THREAD_AT_WARPS) continue;
    const bool past =
        t->state == THREAD_AT_SCOPE || t->state == THREAD_READY || t->state == THREAD_AT_NAMED;
    const instr *i = &m->code[past && t->pc ? t->pc - 1 : t->pc];
    blocked++;
    if (at + 3072 > room) continue;
    listed++;
    if (!first) first = i->op;
    pm_vm_agent(m, t, agent, sizeof agent);
    place[0] = 0;
    if (m->places[i->op].file) pm_vm_place(m, i->op, place, sizeof place);
    if (t->state == THREAD_AT_SCOPE) {
      at +=
          (size_t)snprintf(text + at, room - at,
                           "\n  %s: enters a collective scope%s and waits for the other threads of "
                           "its block; %u of %u have come",
                           agent, place, t->block->n_entering, m->n_threads);
      continue;
    }
    if (t->state == THREAD_AT_TURN) {
      at += (size_t)snprintf(text + at, room - at,
                             "\n  %s: ordered_section%s waits; it is the turn of thread %u", agent,
                             place, t->block->turn);
      continue;
    }
    if (t->state == THREAD_AT_NAMED) {
      const named_barrier *b = t->waits_named;
      at += (size_t)snprintf(
          text + at, room - at,
          "\n  %s: named_barrier_sync%s on named barrier %d; %d of %u lanes have "
          "come",
          agent, place, (int)(b - t->block->named), 32 * __builtin_popcount(b->come), b->lanes);
      continue;
    }
    if (t->state == THREAD_READY) {
      at += (size_t)snprintf(text + at, room - at,
                             "\n  %s: keeps polling%s a value that nobody changes", agent, place);
      continue;
    }
    if (t->state == THREAD_AT_SEMAPHORE) {
      at += (size_t)snprintf(text + at, room - at, "\n  %s: semaphore_wait%s", agent, place);
      at += pm_vm_semaphore_text(m, t, i, text + at, room - at);
      continue;
    }
    const barrier *b = t->waits_for;
    at += (size_t)snprintf(text + at, room - at,
                           "\n  %s: barrier_wait%s on %s for phase %" PRId64 "; %" PRId64
                           " complete, arrivals %u/%u",
                           agent, place, pm_vm_barrier_text(m, t, b, name, sizeof name),
                           b->seen[t->observer] + 1, b->phase, b->arrivals, b->info->arrivals);
    at += pm_vm_missing_parts(m, b, text + at, 1024);
  }
  if (listed < blocked) snprintf(text + at, room - at, "\n  and %u more", blocked - listed);
  pm_fail(err, PM_E_DEADLOCK, "%s", text);
  if (first && m->places[first].file) pm_err_at(err, m->places[first].file, m->places[first].line);
  return STEP_FAIL;
}

/* ---- scheduler ---------------------------------------------------------------------------- */

static int64_t now_ns(void) {
  struct timespec ts;
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
}

static int64_t all_points(const pm_machine *m) { return m->points * m->n_devices; }

static step report(pm_machine *m) {
  int64_t now = now_ns();
  if (now < m->next_report) return STEP_NEXT;
  m->next_report = now + REPORT_NS;
  if (!m->options.progress(m->options.progress_ctx, m->points_done, all_points(m)))
    return STEP_NEXT;
  pm_fail(m->err, PM_E_RUNTIME,
          "the run of kernel '%s' was stopped after %" PRId64 " of %" PRId64 " grid points",
          m->name, m->points_done, all_points(m));
  return STEP_FAIL;
}

static step run_thread(pm_machine *m, thread *t) {
  uint32_t budget = m->n_live > 1 ? 1 + below(m, SLICE) : SLICE;
  m->last = t->block->cluster;
  step s;
  do {
    const instr *i = &m->code[t->pc++];
    s = m->observed ? pm_vm_observe(m, t, i) : i->exec(m, t, i);
  } while (s == STEP_NEXT && --budget);
  return s == STEP_STUCK ? deadlock(m) : s;
}

/* Run one thread for a while, or one task. */
static step choose(pm_machine *m) {
  uint64_t weight[TASK_KINDS], total = (uint64_t)m->n_ready * THREAD_WEIGHT;
  bool tasks = false;
  for (int k = 0; k < TASK_KINDS; k++) {
    weight[k] = (uint64_t)m->tasks[k].n * (m->n_ready ? m->tasks[k].weight : 1);
    total += weight[k];
    tasks |= weight[k] > 0;
  }
  if (!total) return deadlock(m);
  if (m->n_ready == 1 && !tasks) return run_thread(m, m->ready[0]);
  uint64_t x = below(m, total);
  for (int k = 0; k < TASK_KINDS; k++) {
    if (x < weight[k]) {
      task *chosen = m->tasks[k].at[below(m, m->tasks[k].n)];
      m->last = chosen->owner->block->cluster;
      return pm_vm_run_task(m, chosen);
    }
    x -= weight[k];
  }
  return run_thread(m, m->ready[x / THREAD_WEIGHT]);
}

static step check_cluster(pm_machine *m, const cluster *c) {
  for (block *b = c->blocks; b < c->blocks + m->n_blocks; b++) {
    thread *t = &m->threads[(size_t)(b - m->blocks) * m->n_threads];
    if (check_scope(m, t, 0, m->scopes[0], true) == STEP_FAIL) return STEP_FAIL;
  }
  return pm_vm_check_pairs(m, c);
}

/* The next point of the grid, if one is left. */
static void begin_cluster(pm_machine *m, cluster *c) {
  device *d = &m->devices[c->device];
  int64_t rest = d->begun;
  if (d->begun == m->points) return;
  c->number = d->begun++;
  c->refused = false;
  for (uint32_t k = m->n_grid; k-- > 0; rest /= m->grid[k]) c->point[k] = rest % m->grid[k];
  if (m->races) pm_race_begin_cluster(m, c);
  if (m->timeline) pm_time_begin_cluster(m, c);
  if (m->profile_words) pm_profile_begin_cluster(m, c);
  for (block *b = c->blocks; b < c->blocks + m->n_blocks; b++) {
    b->n_entering = b->n_done = b->turn = 0;
    b->in_section = false;
    memset(b->n_pairs, 0, m->n_pairs * sizeof *b->n_pairs);
    memset(b->named, 0, sizeof b->named);
    memset(b->n_parts, 0, m->n_shared_copies * m->n_threads * sizeof *b->n_parts);
    for (uint32_t k = 0; k < m->n_barriers; k++) {
      b->bars[k].phase = 0;
      for (uint32_t j = 0; j < pm_vm_observers(m); j++) b->bars[k].seen[j] = NEVER;
    }
    init_scope(m, b, m->scopes[0], &m->threads[(size_t)(b - m->blocks) * m->n_threads]);
  }
  for (uint32_t k = m->open_copies.n; k-- > 0;) {
    if (m->open_copies.at[k].cluster == c) {
      m->open_copies.at[k] = m->open_copies.at[--m->open_copies.n];
    }
  }
  const uint32_t n = m->n_blocks * m->n_threads;
  thread *first = m->threads + (size_t)(c->blocks - m->blocks) * m->n_threads;
  c->n_live = n;
  m->n_live += n;
  for (thread *t = first; t < first + n; t++) {
    t->pc = 0;
    t->n_uses = 0;
    t->groups = 0;
    for (uint32_t w = 0; m->has_warps && w < WARPS; w++) pm_vm_warps(m, t)[w].groups = 0;
    pm_vm_make_ready(m, t);
  }
}

static void set_weights(pm_machine *m) {
  static const uint32_t choices[] = {LATE, LATE, EVEN, EARLY};
  for (int k = 0; k < TASK_KINDS; k++) {
    m->tasks[k].weight = m->options.seed ? choices[below(m, PM_COUNT(choices))] : LATE;
  }
}

static step run_grid(pm_machine *m) {
  m->points = m->grid_size;
  if (m->shares_grid) m->points = 1 + below(m, (uint64_t)pm_min(m->grid_size, MOST_SHARING));
  m->points_done = 0;
  memset(m->devices, 0, m->n_devices * sizeof *m->devices);
  m->n_live = m->n_ready = m->open_copies.n = 0;
  pm_vm_progress(m);
  for (thread *t = m->threads; t < m->threads + pm_vm_agents(m); t++) t->state = THREAD_DONE;
  for (uint32_t k = 0; k < m->n_clusters; k++) begin_cluster(m, &m->clusters[k]);
  while (m->points_done < all_points(m)) {
    if (choose(m) == STEP_FAIL) return STEP_FAIL;
    if (m->options.progress && !(++m->ticks & 15) && report(m) == STEP_FAIL) return STEP_FAIL;
    if (m->last->n_live || m->last->n_tasks) continue;
    if (check_cluster(m, m->last) == STEP_FAIL) return STEP_FAIL;
    if (m->races) pm_race_end_cluster(m, m->last);
    if (m->timeline) pm_time_end_cluster(m, m->last);
    if (m->profile_words) pm_profile_end_cluster(m, m->last);
    m->points_done++;
    begin_cluster(m, m->last);
  }
  return m->races ? pm_race_end_launch(m) : STEP_NEXT;
}

/* ---- memory of a run ---------------------------------------------------------------------- */

static void *zeroed(size_t bytes) {
  void *p = pm_malloc_lines(bytes);
  if (p) memset(p, 0, bytes);
  return p;
}

static void free_run(pm_machine *m) {
  pm_vm_free_tasks(m);
  for (uint32_t k = 0; m->threads && k < pm_vm_agents(m); k++) {
    pm_free(m->threads[k].frame);
    pm_free(m->threads[k].uses);
    pm_free(m->threads[k].finished);
  }
  for (uint32_t k = 0; m->blocks && k < pm_vm_blocks(m); k++) {
    if (m->blocks[k].bars) pm_free(m->blocks[k].bars[0].seen);
    if (m->blocks[k].bars) pm_free(m->blocks[k].bars[0].uneven);
    pm_free(m->blocks[k].bars);
    pm_free(m->blocks[k].smem);
    pm_free(m->blocks[k].tmem);
    pm_free(m->blocks[k].n_pairs);
    pm_free(m->blocks[k].semaphores);
    pm_free(m->blocks[k].n_left);
    pm_free(m->blocks[k].n_parts);
  }
  pm_free(m->threads);
  pm_free(m->blocks);
  pm_free(m->clusters);
  pm_free(m->semaphores);
  pm_free(m->devices);
  pm_free(m->ready);
  pm_free(m->pack);
  pm_free(m->open_copies.at);
  m->open_copies.at = NULL;
  m->open_copies.n = m->open_copies.cap = 0;
  m->threads = NULL;
  m->blocks = NULL;
  m->clusters = NULL;
  m->semaphores = NULL;
  m->devices = NULL;
  m->ready = NULL;
  m->pack = NULL;
  m->free_tasks = NULL;
  m->allocated = false;
}

static bool allocate_block(pm_machine *m, block *b) {
  b->smem = zeroed(m->smem_bytes);
  b->tmem = zeroed(PM_TMEM_LANES * 4 * (size_t)m->tmem_columns);
  b->n_pairs = zeroed(m->n_pairs * sizeof *b->n_pairs);
  b->semaphores = zeroed(m->n_block_semaphores * sizeof *b->semaphores);
  b->n_left = zeroed(m->n_scopes * sizeof *b->n_left);
  b->n_parts = zeroed(m->n_shared_copies * m->n_threads * sizeof *b->n_parts);
  b->bars = zeroed((m->n_barriers + 1) * sizeof *b->bars);
  int64_t *seen = zeroed((m->n_barriers + 1) * pm_vm_observers(m) * sizeof *seen);
  uneven *u = zeroed((m->n_barriers + 1) * m->n_threads * sizeof *u);
  if (!b->bars || !seen || !u) {
    pm_free(seen);
    pm_free(u);
    return false;
  }
  for (uint32_t k = 0; k <= m->n_barriers; k++) {
    b->bars[k].seen = seen + k * pm_vm_observers(m);
    b->bars[k].uneven = u + k * m->n_threads;
  }
  return b->smem && b->tmem && b->n_pairs && b->semaphores && b->n_left && b->n_parts;
}

static bool allocate(pm_machine *m) {
  const uint32_t n = pm_vm_blocks(m) * m->n_threads, agents = pm_vm_agents(m);
  m->threads = zeroed(agents * sizeof *m->threads);
  m->blocks = zeroed(pm_vm_blocks(m) * sizeof *m->blocks);
  m->clusters = zeroed(m->n_clusters * sizeof *m->clusters);
  m->semaphores = zeroed(m->n_devices * m->n_semaphores * sizeof *m->semaphores);
  m->devices = zeroed(m->n_devices * sizeof *m->devices);
  m->ready = zeroed(agents * sizeof *m->ready);
  m->pack = zeroed(m->pack_bytes);
  if (!m->threads || !m->blocks || !m->ready || !m->pack || !m->clusters || !m->semaphores ||
      !m->devices) {
    return false;
  }
  for (uint32_t k = 0; k < agents; k++) {
    thread *t = &m->threads[k];
    const uint32_t at = k < n ? k : (k - n) / WARPS; /* the thread, of its warps, too */
    t->block = &m->blocks[at / m->n_threads];
    t->observer = t->index = at % m->n_threads;
    if (k >= n) {
      t->of = &m->threads[at];
      t->warp = (k - n) % WARPS;
      t->observer = m->n_threads + t->index * WARPS + t->warp;
    }
    t->frame = zeroed(m->frame_bytes);
    if (!t->frame) return false;
    memcpy(t->frame, m->image, m->image_bytes);
  }
  for (uint32_t k = 0; k < pm_vm_blocks(m); k++) {
    int64_t rest = k % m->n_blocks;
    m->blocks[k].cluster = &m->clusters[k / m->n_blocks];
    m->blocks[k].cluster->device = k / m->n_blocks % m->n_devices;
    if (!rest) m->blocks[k].cluster->blocks = &m->blocks[k];
    for (uint32_t d = m->n_cluster; d-- > 0; rest /= m->cluster[d]) {
      m->blocks[k].coord[d] = rest % m->cluster[d];
    }
    if (!allocate_block(m, &m->blocks[k])) return false;
  }
  return true;
}

void pm_interp_defaults(pm_interp_options *o) {
  *o = (pm_interp_options){.oob_raise = true, .race_raises = true};
}

/* All where blocks may wait for each other. */
static uint32_t choose_clusters(pm_machine *m) {
  if (m->meets_blocks || m->room == 1) return m->room * m->n_devices;
  if (!m->options.seed) return 1;
  switch (below(m, 4)) {
    case 0: return 1;
    case 1: return m->room;
    default: return 2 + below(m, (uint64_t)pm_min(m->room, FEW_CLUSTERS) - 1);
  }
}

pm_code pm_vm_run_once(pm_machine *m, void *const *buffers, const pm_interp_options *o,
                       pm_err *err) {
  m->err = err;
  m->options = *o;
  m->buffers = buffers;
  m->random = o->seed;
  m->next_report = now_ns() + REPORT_NS;
  const uint32_t n = choose_clusters(m);
  if (n != m->n_clusters) free_run(m);
  m->n_clusters = n;
  if (!m->allocated && !allocate(m)) {
    free_run(m);
    return pm_fail(err, PM_E_MEMORY, "no memory to interpret kernel '%s'", m->name);
  }
  m->allocated = true;
  memset(m->semaphores, 0, m->n_devices * m->n_semaphores * sizeof *m->semaphores);
  set_weights(m);
  m->races = NULL;
  m->timeline = NULL;
  bool ok = !o->races || pm_race_begin(m);
  if (!ok) pm_fail(err, PM_E_MEMORY, "no memory to look for races in kernel '%s'", m->name);
  if (ok && o->timeline && !(ok = pm_time_begin(m))) {
    pm_fail(m->err, PM_E_MEMORY, "no memory for a timeline of kernel '%s'", m->name);
  }
  m->poison = NULL;
  if (ok && o->poison && !o->skip_floats && !(ok = pm_poison_begin(m))) {
    pm_fail(err, PM_E_MEMORY, "no memory to track what was never written in kernel '%s'", m->name);
  }
  m->observed = m->poison || o->skip_floats || m->timeline || m->profile_words;
  m->steps = 0;
  ok = ok && run_grid(m) != STEP_FAIL;
  ok = ok && (!m->poison || pm_poison_check(m) != STEP_FAIL);
  pm_poison_end(m);
  pm_race_end(m);
  pm_time_end(m);
  if (ok) return PM_OK;
  pm_vm_drop_tasks(m);
  return err->code;
}

size_t pm_interp_bytes(const pm_machine *m) { return sizeof *m + m->arena.total; }

void pm_interp_free(pm_machine *m) {
  if (!m) return;
  free_run(m);
  pm_arena_free(&m->arena);
  pm_free(m);
}
